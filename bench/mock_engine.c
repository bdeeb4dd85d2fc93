/* A mock inference engine: what stands behind every gateway when gateways are measured.
 *
 * One thread, epoll, HTTP/1.1 with keep-alive and pipelining. It computes nothing, so that the CPU of the machine is left to the
 * gateway and to the load generator. POST answers a fixed chat completion, or, when the body asks for a stream, a stream of SSE
 * events: one per tick for every open stream (as an engine with continuous batching does), or all at once with a tick of 0.
 *
 * Every answer says who wrote it, so that a client can prove that nothing was lost, repeated or spliced:
 *   a completion has   "id":"<worker>-<n>"  near its start and  "system_fingerprint":"<worker>-<n>"  at its end;
 *   an event has       "id":"<worker>-<n>"  and  "system_fingerprint":"<worker>-<n>/<sequence>/<total>/<microseconds>",
 * where <worker> is the --mark and the process id, <n> counts answers, and the time is CLOCK_MONOTONIC when the event was written.
 *
 * With --ports N it listens on N ports, the first of them --port: one process that stands for N engines, which share a mark.
 *
 * What it does not do: TLS, HTTP/2, trailers with a meaning, or JSON parsing (the "stream" key is found by its text).
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <getopt.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum {
    READ_SIZE = 64 * 1024,
    MAX_HEAD = 64 * 1024,
    MAX_REQUEST = 80 * 1024 * 1024,
    HIGH_WATER = 256 * 1024, /* a stream pauses while this much is unsent: a slow reader must not fill our memory */
    MAX_EVENT = 16 * 1024,
    MAX_ANSWER = 16 * 1024 * 1024,
    MAX_PORTS = 4096,
};

struct buffer {
    char *data;
    size_t len, cap;
};

struct conn {
    int fd;
    bool closed, closing, wants_write, streaming;
    struct buffer in, out;
    size_t sent;             /* how much of `out` the kernel has taken */
    long answer;             /* number of the answer being streamed */
    int sequence;            /* next event of it */
    struct conn *prev, *next; /* list of open streams */
    struct conn *next_dead;
};

struct request {
    const char *head;
    size_t head_len; /* with the empty line */
    const char *body;
    size_t body_len;
    size_t total; /* bytes of the input that the request took */
    bool keep_alive;
};

static const char *model = "m";
static char worker[64];
static int events = 100, event_bytes = 224, answer_bytes = 640, tick_ms = 20;
static long answers;
static int epoll;
static struct conn streams = {.prev = &streams, .next = &streams};
static struct conn *dead;
static struct buffer decoded; /* the body of the chunked request being read */

static void die(const char *what) {
    perror(what);
    exit(1);
}

static long long now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000LL + t.tv_nsec / 1000;
}

static void reserve(struct buffer *b, size_t extra) {
    if (b->len + extra <= b->cap) return;
    while (b->cap < b->len + extra) b->cap = b->cap ? b->cap * 2 : 4096;
    b->data = realloc(b->data, b->cap);
    if (!b->data) die("realloc");
}

static void append(struct buffer *b, const void *data, size_t len) {
    reserve(b, len);
    memcpy(b->data + b->len, data, len);
    b->len += len;
}

__attribute__((format(printf, 2, 3))) static void appendf(struct buffer *b, const char *format, ...) {
    va_list args, again;
    va_start(args, format);
    va_copy(again, args);
    int len = vsnprintf(NULL, 0, format, args);
    reserve(b, (size_t)len + 1);
    vsnprintf(b->data + b->len, (size_t)len + 1, format, again);
    b->len += (size_t)len;
    va_end(again);
    va_end(args);
}

/* Connections. A closed one is freed only after the batch of epoll events that may still name it. */

static void stop_streaming(struct conn *c) {
    if (!c->streaming) return;
    c->streaming = false;
    c->prev->next = c->next;
    c->next->prev = c->prev;
}

static void drop(struct conn *c) {
    if (c->closed) return;
    stop_streaming(c);
    close(c->fd);
    c->closed = true;
    c->next_dead = dead;
    dead = c;
}

static void bury(void) {
    while (dead) {
        struct conn *c = dead;
        dead = c->next_dead;
        free(c->in.data);
        free(c->out.data);
        free(c);
    }
}

static void watch(struct conn *c, bool write) {
    if (c->wants_write == write) return;
    struct epoll_event e = {.events = EPOLLIN | (write ? EPOLLOUT : 0), .data.ptr = c};
    if (epoll_ctl(epoll, EPOLL_CTL_MOD, c->fd, &e)) die("epoll_ctl");
    c->wants_write = write;
}

static void flush(struct conn *c) {
    while (!c->closed && c->sent < c->out.len) {
        ssize_t n = send(c->fd, c->out.data + c->sent, c->out.len - c->sent, MSG_NOSIGNAL);
        if (n >= 0) {
            c->sent += (size_t)n;
        } else if (errno == EAGAIN) {
            watch(c, true);
            return;
        } else if (errno != EINTR) {
            drop(c);
        }
    }
    if (c->closed) return;
    c->out.len = c->sent = 0;
    watch(c, false);
    if (c->closing && !c->streaming) drop(c);
}

/* Answers. */

static void write_event(struct conn *c) {
    if (c->sequence == events) {
        append(&c->out, "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n", 24);
        stop_streaming(c);
        return;
    }
    static const char *const shape =
        "data: {\"id\":\"%s-%ld\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"%s\",\"choices\":[{\"index\":0,"
        "\"delta\":{\"content\":\" t%.*s\"},\"finish_reason\":%s}],\"system_fingerprint\":\"%s-%ld/%d/%d/%lld\"}\n\n";
    static char padding[MAX_EVENT], text[2 * MAX_EVENT];
    if (!padding[0]) memset(padding, 'o', sizeof padding - 1);
    const char *reason = c->sequence + 1 == events ? "\"stop\"" : "null";
    long long now = now_us();
    int pad = 0, len = 0;
    for (int pass = 0; pass < 2; pass++) { /* the first pass only measures */
        len = snprintf(text, sizeof text, shape, worker, c->answer, model, pad, padding, reason, worker, c->answer, c->sequence, events, now);
        pad = event_bytes > len ? event_bytes - len : 0;
        if (!pad) break;
    }
    appendf(&c->out, "%x\r\n", (unsigned)len);
    append(&c->out, text, (size_t)len);
    append(&c->out, "\r\n", 2);
    c->sequence++;
}

/* Writes what is due: one event, or with a tick of 0 as many as the reader takes. */
static void pump(struct conn *c) {
    do {
        while (c->streaming && c->out.len - c->sent < HIGH_WATER) {
            write_event(c);
            if (tick_ms) break;
        }
        flush(c);
    } while (!tick_ms && !c->closed && c->streaming && !c->wants_write);
}

static void start_stream(struct conn *c) {
    static const char head[] = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n";
    append(&c->out, head, sizeof head - 1);
    c->streaming = true;
    c->answer = answers++;
    c->sequence = 0;
    c->prev = streams.prev;
    c->next = &streams;
    streams.prev->next = c;
    streams.prev = c;
    if (tick_ms)
        flush(c); /* the first event comes with the next tick */
    else
        pump(c);
}

static void answer_text(struct conn *c, int status, const char *type, const char *text) {
    const char *phrase = status == 200 ? "OK" : status == 400 ? "Bad Request" : status == 404 ? "Not Found" : "Content Too Large";
    appendf(&c->out, "HTTP/1.1 %d %s\r\nContent-Type: %s\r\nContent-Length: %zu\r\n\r\n%s", status, phrase, type, strlen(text), text);
}

static void answer_completion(struct conn *c) {
    static struct buffer body;
    static char *padding;
    if (!padding) {
        padding = malloc((size_t)answer_bytes + 1);
        if (!padding) die("malloc");
        memset(padding, 'o', (size_t)answer_bytes);
        padding[answer_bytes] = 0;
    }
    static const char *const shape =
        "{\"id\":\"%s-%ld\",\"object\":\"chat.completion\",\"created\":1700000000,\"model\":\"%s\",\"choices\":[{\"index\":0,\"message\":{\"role\":"
        "\"assistant\",\"content\":\"t%.*s\"},\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":500,\"completion_tokens\":100,"
        "\"total_tokens\":600},\"system_fingerprint\":\"%s-%ld\"}";
    long n = answers++;
    int len = snprintf(NULL, 0, shape, worker, n, model, 0, padding, worker, n);
    body.len = 0;
    appendf(&body, shape, worker, n, model, answer_bytes > len ? answer_bytes - len : 0, padding, worker, n);
    appendf(&c->out, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n", body.len);
    append(&c->out, body.data, body.len);
}

static void answer_get(struct conn *c, const char *target) {
    char text[512];
    size_t len = strcspn(target, " ?\r");
#define IS(path) (len == sizeof path - 1 && !memcmp(target, path, sizeof path - 1))
    if (IS("/v1/models") || IS("/models")) {
        snprintf(text, sizeof text, "{\"object\":\"list\",\"data\":[{\"id\":\"%s\",\"object\":\"model\",\"created\":1,\"owned_by\":\"mock\",\"root\":\"%s\",\"max_model_len\":32768}]}", model, model);
        answer_text(c, 200, "application/json", text);
    } else if (IS("/health") || IS("/health_generate") || IS("/healthz") || IS("/ping")) {
        answer_text(c, 200, "application/json", "{}");
    } else if (IS("/metrics")) {
        int open = 0;
        for (struct conn *s = streams.next; s != &streams; s = s->next) open++;
        snprintf(text, sizeof text, "vllm:num_requests_running{model_name=\"%s\"} %d\nvllm:num_requests_waiting{model_name=\"%s\"} 0\n", model, open, model);
        answer_text(c, 200, "text/plain; version=0.0.4", text);
    } else if (IS("/get_model_info") || IS("/model_info") || IS("/get_server_info") || IS("/server_info")) {
        snprintf(text, sizeof text, "{\"model_path\":\"%s\",\"served_model_name\":\"%s\",\"tokenizer_path\":\"%s\",\"is_generation\":true,\"version\":\"0\"}", model, model, model);
        answer_text(c, 200, "application/json", text);
    } else {
        answer_text(c, 404, "application/json", "{\"error\":{\"message\":\"not found\",\"type\":\"invalid_request_error\",\"param\":null,\"code\":null}}");
    }
#undef IS
}

/* Requests. */

/* The value of a header, without the spaces before it; NULL if absent. The head ends with an empty line. */
static const char *header(const char *head, size_t head_len, const char *name, size_t *len) {
    size_t name_len = strlen(name);
    const char *end = head + head_len, *line = head;
    while ((line = memmem(line, (size_t)(end - line), "\r\n", 2)) && (line += 2) < end) {
        if ((size_t)(end - line) <= name_len || strncasecmp(line, name, name_len) || line[name_len] != ':') continue;
        const char *value = line + name_len + 1;
        while (*value == ' ' || *value == '\t') value++;
        *len = (size_t)((const char *)memmem(value, (size_t)(end - value), "\r\n", 2) - value);
        return value;
    }
    return NULL;
}

/* Decodes a chunked body into `decoded`. Returns the bytes it took, 0 if more are needed, -1 if it is malformed. */
static ssize_t read_chunks(const char *start, size_t len) {
    const char *p = start, *end = start + len;
    decoded.len = 0;
    for (;;) {
        const char *line = memmem(p, (size_t)(end - p), "\r\n", 2);
        if (!line) return end - p > 1024 ? -1 : 0;
        char *after;
        unsigned long size = strtoul(p, &after, 16);
        if (after == p || after > line || size > MAX_REQUEST) return -1;
        p = line + 2;
        if (size == 0) break;
        if ((size_t)(end - p) < size + 2) return 0;
        if (memcmp(p + size, "\r\n", 2)) return -1;
        append(&decoded, p, size);
        p += size + 2;
    }
    for (;;) { /* trailers, up to an empty line */
        const char *line = memmem(p, (size_t)(end - p), "\r\n", 2);
        if (!line) return end - p > MAX_HEAD ? -1 : 0;
        bool empty = line == p;
        p = line + 2;
        if (empty) return p - start;
    }
}

/* Reads one request from the input. Returns 1 when it is whole, 0 if more bytes are needed, -1 if it is malformed. */
static int read_request(struct conn *c, struct request *r) {
    const char *data = c->in.data;
    const char *end = memmem(data, c->in.len, "\r\n\r\n", 4);
    if (!end) return c->in.len > MAX_HEAD ? -1 : 0;
    size_t len;
    const char *value;
    r->head = data;
    r->head_len = (size_t)(end - data) + 4;
    r->body = data + r->head_len;
    r->body_len = 0;
    r->total = r->head_len;
    const char *first_line_end = memmem(data, r->head_len, "\r\n", 2);
    r->keep_alive = first_line_end - data > 8 && !memcmp(first_line_end - 8, "HTTP/1.1", 8);
    if ((value = header(data, r->head_len, "connection", &len))) {
        if (len == 5 && !strncasecmp(value, "close", 5)) r->keep_alive = false;
        if (len == 10 && !strncasecmp(value, "keep-alive", 10)) r->keep_alive = true;
    }
    if ((value = header(data, r->head_len, "transfer-encoding", &len))) {
        if (len != 7 || strncasecmp(value, "chunked", 7)) return -1;
        ssize_t taken = read_chunks(r->body, c->in.len - r->head_len);
        if (taken > 0) {
            r->body = decoded.data;
            r->body_len = decoded.len;
            r->total += (size_t)taken;
            return 1;
        }
        if (taken < 0) return -1;
    } else {
        if ((value = header(data, r->head_len, "content-length", &len))) r->body_len = strtoul(value, NULL, 10);
        if (r->body_len > MAX_REQUEST) return -1;
        r->total += r->body_len;
        if (c->in.len >= r->total) return 1;
    }
    /* Only a client that still holds the body back needs the word to go on. */
    if (c->in.len == r->head_len && (value = header(data, r->head_len, "expect", &len)) && len == 12 && !strncasecmp(value, "100-continue", 12)) {
        append(&c->out, "HTTP/1.1 100 Continue\r\n\r\n", 25);
        flush(c);
    }
    return 0;
}

/* Whether the body has "stream": true. A quoted key inside a string would be \"stream\", which does not match. */
static bool wants_stream(const char *body, size_t len) {
    const char *p = body, *end = body + len;
    while (p < end && (p = memmem(p, (size_t)(end - p), "\"stream\"", 8))) {
        p += 8;
        while (p < end && strchr(" \t\r\n", *p)) p++;
        if (p == end || *p++ != ':') continue;
        while (p < end && strchr(" \t\r\n", *p)) p++;
        return p < end && *p == 't';
    }
    return false;
}

/* Answers the requests in the input, one at a time: a pipelined one waits for the stream before it. */
static void serve(struct conn *c) {
    while (!c->closed && !c->closing && !c->streaming && c->in.len) {
        struct request r;
        int whole = read_request(c, &r);
        if (whole == 0) return;
        if (whole < 0) {
            answer_text(c, 400, "text/plain", "bad request\n");
            c->closing = true;
            flush(c);
            return;
        }
        if (!r.keep_alive) c->closing = true;
        const char *space = memchr(r.head, ' ', r.head_len);
        bool post = !strncmp(r.head, "POST ", 5), stream = post && wants_stream(r.body, r.body_len);
        if (post && !stream)
            answer_completion(c);
        else if (!post)
            answer_get(c, space ? space + 1 : "");
        memmove(c->in.data, c->in.data + r.total, c->in.len - r.total);
        c->in.len -= r.total;
        if (stream)
            start_stream(c);
        else
            flush(c);
    }
}

static void receive(struct conn *c) {
    reserve(&c->in, READ_SIZE);
    ssize_t n = recv(c->fd, c->in.data + c->in.len, c->in.cap - c->in.len, 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n <= 0) { /* a client that leaves ends its stream */
        drop(c);
        return;
    }
    c->in.len += (size_t)n;
    if (c->in.len > MAX_REQUEST + MAX_HEAD)
        drop(c);
    else
        serve(c);
}

static void accept_all(int listener) {
    int fd, one = 1;
    while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0) {
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        struct conn *c = calloc(1, sizeof *c);
        if (!c) die("calloc");
        c->fd = fd;
        struct epoll_event e = {.events = EPOLLIN, .data.ptr = c};
        if (epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &e)) die("epoll_ctl");
    }
}

static void on_tick(int timer) {
    unsigned long long expired;
    if (read(timer, &expired, sizeof expired) < 0) return;
    for (struct conn *c = streams.next, *next; c != &streams; c = next) {
        next = c->next;
        pump(c);
        serve(c); /* what was pipelined behind a stream that has just ended */
    }
}

static int listen_on(int port) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), one = 1;
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(fd, (struct sockaddr *)&a, sizeof a) || listen(fd, 4096)) die("mock_engine: listen");
    return fd;
}

int main(int argc, char **argv) {
    static const struct option options[] = {
        {"port", 1, 0, 'p'},         {"mark", 1, 0, 'w'},    {"events", 1, 0, 'n'}, {"event-bytes", 1, 0, 'b'},
        {"answer-bytes", 1, 0, 'a'}, {"tick-ms", 1, 0, 't'}, {"model", 1, 0, 'm'},  {"ports", 1, 0, 'P'},
        {0, 0, 0, 0},
    };
    const char *mark = "a";
    int port = 9001, ports = 1, o;
    while ((o = getopt_long(argc, argv, "", options, NULL)) != -1) {
        switch (o) {
        case 'p': port = atoi(optarg); break;
        case 'P': ports = atoi(optarg); break;
        case 'w': mark = optarg; break;
        case 'n': events = atoi(optarg); break;
        case 'b': event_bytes = atoi(optarg); break;
        case 'a': answer_bytes = atoi(optarg); break;
        case 't': tick_ms = atoi(optarg); break;
        case 'm': model = optarg; break;
        default:
            fprintf(stderr, "usage: mock_engine [--port 9001] [--ports 1] [--mark a] [--events 100] [--event-bytes 224] [--answer-bytes 640] [--tick-ms 20] [--model m]\n");
            return 2;
        }
    }
    if (ports < 1 || ports > MAX_PORTS || event_bytes >= MAX_EVENT || answer_bytes < 0 || answer_bytes > MAX_ANSWER || events < 0 || tick_ms < 0 || strlen(mark) > 40 || strlen(model) > 60) {
        fprintf(stderr, "mock_engine: an option is out of range\n");
        return 2;
    }
    snprintf(worker, sizeof worker, "%s%d", mark, (int)getpid());
    signal(SIGPIPE, SIG_IGN);
    epoll = epoll_create1(EPOLL_CLOEXEC);
    static int listeners[MAX_PORTS];
    int timer = -1;
    /* Listeners and the timer are told from connections by the address of their descriptor. */
    struct epoll_event e = {.events = EPOLLIN};
    for (int i = 0; i < ports; i++) {
        listeners[i] = listen_on(port + i);
        e.data.ptr = &listeners[i];
        if (epoll_ctl(epoll, EPOLL_CTL_ADD, listeners[i], &e)) die("epoll_ctl");
    }
    if (tick_ms) {
        struct timespec tick = {tick_ms / 1000, (tick_ms % 1000) * 1000000L};
        struct itimerspec every = {tick, tick};
        timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
        timerfd_settime(timer, 0, &every, NULL);
        e.data.ptr = &timer;
        if (epoll_ctl(epoll, EPOLL_CTL_ADD, timer, &e)) die("epoll_ctl");
    }
    struct epoll_event ready[512];
    for (;;) {
        int n = epoll_wait(epoll, ready, 512, -1);
        for (int i = 0; i < n; i++) {
            int *listener = ready[i].data.ptr;
            if (listener >= listeners && listener < listeners + ports) {
                accept_all(*listener);
            } else if (ready[i].data.ptr == &timer) {
                on_tick(timer);
            } else {
                struct conn *c = ready[i].data.ptr;
                if (!c->closed && ready[i].events & EPOLLOUT) {
                    flush(c);
                    if (!tick_ms && c->streaming && !c->wants_write && !c->closed) pump(c);
                    serve(c);
                }
                if (!c->closed && ready[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) receive(c);
            }
        }
        bury();
    }
}
