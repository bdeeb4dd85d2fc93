/* A load generator that reads every answer.
 *
 * One thread, epoll. Closed loop: --connections clients, each sends its next request when the last one is answered. Open loop
 * (--rate): requests start at fixed times whether or not earlier ones are answered, and latency counts from the time a request was
 * due, so that a gateway that stalls cannot hide the requests that it kept waiting.
 *
 * Requests are chat completions of about --body-bytes (at least 80), of --prompts different conversations in turn; --stream-share of them ask for
 * a stream. The answers are those of mock_engine.c, and each one is checked: the status, the whole body, and the marks that tell
 * which worker wrote it. A completion must carry the same mark at both ends; a stream must have every event, in sequence, all from
 * one worker and one answer, and end with [DONE], or, if the engine died, with the gateway's error event and nothing after it.
 *
 * Prints one JSON object. Times are microseconds: latency_us is that of completions, first_event_us and event_delay_us (from the time
 * the engine wrote an event to the time it was read here, on the same clock) are those of streams. The first few bad answers are shown on stderr.
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

enum { READ_SIZE = 64 * 1024, MAX_HEAD = 64 * 1024, MAX_PROMPTS = 4096, MAX_WORKERS = 64, MARK = 96, SHORT_BODY = 256 };

/* What can be wrong with an answer; the first thing found is the one counted. */
enum fault {
    NONE,
    CONNECT,     /* no connection */
    NO_ANSWER,   /* the connection ended before a response head */
    BAD_HTTP,    /* not a response, or not framed as one */
    STATUS,      /* not a 200 */
    CUT,         /* the connection ended inside the body */
    MALFORMED,   /* an event or a body that no engine wrote */
    SEQUENCE,    /* an event missing, repeated or out of order */
    SPLICED,     /* parts of more than one answer */
    NO_DONE,     /* a stream that ended in good order, but early and without the error event */
    UNCOMMITTED, /* the error event although no event had been relayed: it should have been tried elsewhere */
    TIMEOUT,
    FAULTS,
};
static const char *const fault_names[FAULTS] = {"", "connect", "no_answer", "bad_http", "status", "cut", "malformed", "sequence", "spliced", "no_done", "uncommitted", "timeout"};

static const char error_event[] = "data: {\"error\":{\"message\":\"the upstream stream failed\",\"type\":\"server_error\",\"param\":null,\"code\":null}}";

struct buffer {
    char *data;
    size_t len, cap;
};

struct samples {
    unsigned *us;
    size_t len, cap;
};

enum state { HEAD, SIZED, CHUNK_SIZE, CHUNK, CHUNK_END, TRAILER, TO_CLOSE, COMPLETE };

struct conn {
    int fd; /* -1: not connected */
    bool busy, connecting, wants_write, rested, close_after;
    const struct buffer *request;
    size_t sent;
    bool stream;
    long long due, deadline, idle_since;
    /* the response */
    enum state state;
    int status;
    size_t left;       /* of the body or of the chunk */
    struct buffer raw; /* received, not yet understood */
    struct buffer text; /* the whole body of a completion, or the events not yet ended */
    bool answered;     /* any byte of it came */
    /* what its events said so far */
    enum fault fault;
    char mark[MARK];
    int next, total;
    bool done, broken;
    struct conn *next_idle;
};

static const char *host = "127.0.0.1", *path = "/v1/chat/completions", *model = "m", *api_key = NULL;
static int port = 8087, connections = 32, prompts = 64, body_bytes = 2048, timeout_s = 30;
static double seconds = 8, rate, stream_share;
static long request_limit = -1;
static bool drain;

static struct buffer requests[MAX_PROMPTS][2]; /* [conversation][stream] */
static struct conn *conns, *idle;
static int epoll, timer, shown;
static long started, finished, resent, chunks, broken_streams, good_streams, good_plain, faults[FAULTS], statuses[600];
static long long bytes, begin, not_before;
static struct samples latency, first_event, event_delay;
static struct {
    char name[MARK];
    long answers;
} workers[MAX_WORKERS];

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

static void consume(struct buffer *b, size_t len) {
    memmove(b->data, b->data + len, b->len - len);
    b->len -= len;
}

static void sample(struct samples *s, long long us) {
    if (s->len == s->cap) {
        s->cap = s->cap ? s->cap * 2 : 65536;
        s->us = realloc(s->us, s->cap * sizeof *s->us);
        if (!s->us) die("realloc");
    }
    s->us[s->len++] = us < 0 ? 0 : (unsigned)us;
}

/* Requests: written once, sent many times. */

static void write_requests(void) {
    static const char *const sentence = "You are the assistant of a workshop. Answer from its manuals, name the page, and say so when they are silent. ";
    for (int i = 0; i < prompts; i++) {
        for (int stream = 0; stream < 2; stream++) {
            if (stream_share == (stream ? 0 : 1)) continue; /* never sent */
            struct buffer body = {0}, *r = &requests[i][stream];
            if (body_bytes < SHORT_BODY) { /* one message, and nothing that could be left out */
                appendf(&body, "{\"model\":\"%s\",\"messages\":[{\"role\":\"user\",\"content\":\"Hello %d", model, i);
                while (body.len + 19 < (size_t)body_bytes) append(&body, "!", 1);
                appendf(&body, "\"}],\"stream\":%s}", stream ? "true" : "false");
            } else {
                appendf(&body, "{\"model\":\"%s\",\"messages\":[{\"role\":\"system\",\"content\":\"Conversation %d. ", model, i);
                while (body.len + strlen(sentence) + 160 < (size_t)body_bytes) append(&body, sentence, strlen(sentence));
                appendf(&body, "\"},{\"role\":\"user\",\"content\":\"How is it set up?\"}],\"max_tokens\":100,\"temperature\":0.0,\"stream\":%s}", stream ? "true" : "false");
            }
            appendf(r, "POST %s HTTP/1.1\r\nHost: %s:%d\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n", path, host, port, body.len);
            if (api_key) appendf(r, "Authorization: Bearer %s\r\n", api_key);
            appendf(r, "\r\n");
            append(r, body.data, body.len);
            free(body.data);
        }
    }
}

/* Connections. */

static void watch(struct conn *c, int op, bool write) {
    struct epoll_event e = {.events = EPOLLIN | EPOLLRDHUP | (write ? EPOLLOUT : 0), .data.ptr = c};
    if (epoll_ctl(epoll, op, c->fd, &e)) die("epoll_ctl");
    c->wants_write = write;
}

static void disconnect(struct conn *c) {
    if (c->fd >= 0) close(c->fd);
    c->fd = -1;
    c->connecting = c->wants_write = false;
    c->raw.len = 0;
}

static void release(struct conn *c) {
    c->busy = false;
    c->idle_since = now_us();
    c->next_idle = idle; /* last in, first out: in an open loop few connections stay warm, as in a client's pool */
    idle = c;
}

static void count_worker(const char *mark) {
    size_t len = strcspn(mark, "-");
    for (int i = 0; i < MAX_WORKERS; i++) {
        if (!workers[i].name[0]) snprintf(workers[i].name, MARK, "%.*s", (int)len, mark);
        if (strlen(workers[i].name) == len && !memcmp(workers[i].name, mark, len)) {
            workers[i].answers++;
            return;
        }
    }
}

static void finish(struct conn *c, enum fault fault) {
    if (fault == NONE) fault = c->fault;
    finished++;
    if (fault != NONE) {
        faults[fault]++;
        if (shown++ < 5) {
            fprintf(stderr, "%s: %s, status %d, after %d events of %s at %.3f s: %.*s\n", fault_names[fault], c->stream ? "stream" : "plain", c->status, c->next,
                    c->mark, (double)(now_us() - begin) / 1e6, (int)(c->text.len < 300 ? c->text.len : 300), c->text.data ? c->text.data : "");
        }
    } else {
        count_worker(c->mark);
        if (c->broken) {
            broken_streams++;
        } else {
            (*(c->stream ? &good_streams : &good_plain))++;
            if (!c->stream) sample(&latency, now_us() - c->due);
        }
    }
    if (fault != NONE || c->close_after) disconnect(c);
    release(c);
}

static void send_request(struct conn *c) {
    while (c->sent < c->request->len) {
        ssize_t n = send(c->fd, c->request->data + c->sent, c->request->len - c->sent, MSG_NOSIGNAL);
        if (n > 0) {
            c->sent += (size_t)n;
        } else if (errno == EAGAIN) {
            if (!c->wants_write) watch(c, EPOLL_CTL_MOD, true);
            return;
        } else if (errno != EINTR) {
            return; /* the reading side learns what is left to read, and how it ended */
        }
    }
    if (c->wants_write) watch(c, EPOLL_CTL_MOD, false);
}

static void start(struct conn *c, long long due) {
    long n = started++;
    c->busy = true;
    c->due = due;
    c->deadline = due + timeout_s * 1000000LL;
    /* Streams are spread evenly: request n is one if the running share passes an integer there. */
    c->stream = (long)((double)(n + 1) * stream_share) > (long)((double)n * stream_share);
    c->request = &requests[n % prompts][c->stream];
    c->sent = 0;
    c->state = HEAD;
    c->status = 0;
    c->raw.len = c->text.len = 0;
    c->answered = c->close_after = c->done = c->broken = false;
    c->fault = NONE;
    c->mark[0] = 0;
    c->next = 0;
    c->total = -1;
    c->rested = c->fd >= 0 && now_us() - c->idle_since > 1000000;
    if (c->fd >= 0) {
        send_request(c);
        return;
    }
    int one = 1;
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    inet_pton(AF_INET, host, &a.sin_addr);
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (c->fd < 0) die("socket");
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (connect(c->fd, (struct sockaddr *)&a, sizeof a) && errno != EINPROGRESS) {
        not_before = now_us() + 10000; /* nobody there: do not spin */
        finish(c, CONNECT);
        return;
    }
    c->connecting = true;
    watch(c, EPOLL_CTL_ADD, true);
}

/* Checking what came. */

/* Copies the string that follows `key` up to one of `stops`; false if it is not there. */
static bool find_mark(const char *text, size_t len, const char *key, const char *stops, char *mark, const char **after) {
    const char *p = memmem(text, len, key, strlen(key));
    if (!p) return false;
    p += strlen(key);
    size_t n = 0;
    while (p + n < text + len && n < MARK - 1 && !strchr(stops, p[n])) n++;
    memcpy(mark, p, n);
    mark[n] = 0;
    if (after) *after = p + n;
    return n > 0 && p + n < text + len;
}

static enum fault check_event(struct conn *c, char *event, size_t len) {
    if (c->done || c->broken) return MALFORMED; /* nothing may follow an end */
    if (len == sizeof error_event - 1 && !memcmp(event, error_event, len)) {
        c->broken = true;
        return c->next ? NONE : UNCOMMITTED;
    }
    if (len == 12 && !memcmp(event, "data: [DONE]", 12)) {
        c->done = true;
        return c->next == c->total ? NONE : SEQUENCE;
    }
    char id[MARK], mark[MARK], *rest;
    const char *after;
    if (len < 8 || memcmp(event, "data: {", 7) || event[len - 1] != '}') return MALFORMED;
    if (!find_mark(event, len, "\"id\":\"", "\"", id, NULL)) return MALFORMED;
    if (!find_mark(event, len, "\"system_fingerprint\":\"", "/", mark, &after)) return MALFORMED;
    if (strcmp(id, mark)) return SPLICED;
    long sequence = strtol(after + 1, &rest, 10), total = strtol(rest + 1, &rest, 10);
    long long written = strtoll(rest + 1, &rest, 10), now = now_us();
    if (*rest != '"') return MALFORMED;
    if (c->next == 0) {
        strcpy(c->mark, mark);
        c->total = (int)total;
        sample(&first_event, now - c->due);
    } else if (strcmp(c->mark, mark)) {
        return SPLICED;
    }
    if (sequence != c->next || total != c->total) return SEQUENCE;
    c->next++;
    chunks++;
    sample(&event_delay, now - written);
    return NONE;
}

static enum fault check_completion(struct conn *c) {
    char id[MARK], mark[MARK];
    if (c->text.len < 2 || c->text.data[0] != '{' || c->text.data[c->text.len - 1] != '}') return MALFORMED;
    if (!find_mark(c->text.data, c->text.len, "\"id\":\"", "\"", id, NULL)) return MALFORMED;
    if (!find_mark(c->text.data, c->text.len, "\"system_fingerprint\":\"", "\"", mark, NULL)) return MALFORMED;
    strcpy(c->mark, mark);
    return strcmp(id, mark) ? SPLICED : NONE;
}

static void body(struct conn *c, const char *data, size_t len) {
    bytes += (long long)len;
    append(&c->text, data, len);
    if (!c->stream || c->status != 200 || c->fault != NONE) return;
    size_t used = 0;
    for (char *p = c->text.data, *end; (end = memmem(p, c->text.len - used, "\n\n", 2)); p = end + 2) {
        *end = 0;
        enum fault f = check_event(c, p, (size_t)(end - p));
        *end = '\n';
        if (f != NONE) {
            c->fault = f;
            return; /* keeps the text, to show it */
        }
        used = (size_t)(end + 2 - c->text.data);
    }
    consume(&c->text, used);
}

static enum fault check_whole(struct conn *c) {
    statuses[c->status]++;
    if (c->status != 200) return STATUS;
    if (!c->stream) return check_completion(c);
    if (c->fault != NONE) return c->fault;
    if (c->text.len) return MALFORMED; /* part of an event */
    return c->done || c->broken ? NONE : NO_DONE;
}

/* Reading HTTP. */

static bool read_head(struct conn *c) {
    char *end = memmem(c->raw.data, c->raw.len, "\r\n\r\n", 4);
    if (!end) {
        if (c->raw.len > MAX_HEAD) c->fault = BAD_HTTP;
        return false;
    }
    if (memcmp(c->raw.data, "HTTP/1.", 7) || (c->status = atoi(c->raw.data + 9)) < 100 || c->status > 599) {
        c->fault = BAD_HTTP;
        return false;
    }
    size_t head = (size_t)(end - c->raw.data) + 4;
    if (c->status < 200) { /* an interim response */
        consume(&c->raw, head);
        return true;
    }
    c->state = TO_CLOSE;
    c->left = 0;
    for (char *line = memmem(c->raw.data, head, "\r\n", 2) + 2; line < end; line = memmem(line, head, "\r\n", 2) + 2) {
        char *value = memchr(line, ':', (size_t)(end - line));
        if (!value) {
            c->fault = BAD_HTTP;
            return false;
        }
        do value++;
        while (*value == ' ');
        if (!strncasecmp(line, "content-length:", 15)) {
            c->left = strtoul(value, NULL, 10);
            c->state = c->left ? SIZED : COMPLETE;
        } else if (!strncasecmp(line, "transfer-encoding:", 18)) {
            if (!strncasecmp(value, "chunked\r", 8)) c->state = CHUNK_SIZE;
        } else if (!strncasecmp(line, "connection:", 11)) {
            if (!strncasecmp(value, "close\r", 6)) c->close_after = true;
        }
    }
    if (c->state == TO_CLOSE) c->close_after = true;
    consume(&c->raw, head);
    return true;
}

/* One step of the response; false when it needs more bytes (or is over). */
static bool step(struct conn *c) {
    if (c->state == HEAD) return read_head(c);
    if (c->state == SIZED || c->state == CHUNK || c->state == TO_CLOSE) {
        size_t take = c->raw.len;
        if (c->state != TO_CLOSE && take > c->left) take = c->left;
        if (!take) return false;
        body(c, c->raw.data, take);
        consume(&c->raw, take);
        c->left -= c->state == TO_CLOSE ? 0 : take;
        if (!c->left && c->state == SIZED) c->state = COMPLETE;
        if (!c->left && c->state == CHUNK) c->state = CHUNK_END;
        return true;
    }
    if (c->state == COMPLETE) return false;
    char *end = c->raw.len ? memmem(c->raw.data, c->raw.len, "\r\n", 2) : NULL; /* the rest are lines */
    if (!end) {
        if (c->raw.len > MAX_HEAD) c->fault = BAD_HTTP;
        return false;
    }
    bool empty = end == c->raw.data;
    if (c->state == CHUNK_SIZE) {
        char *after;
        c->left = strtoul(c->raw.data, &after, 16);
        if (after == c->raw.data || after > end) {
            c->fault = BAD_HTTP;
            return false;
        }
        c->state = c->left ? CHUNK : TRAILER;
    } else if (c->state == CHUNK_END) {
        if (!empty) {
            c->fault = BAD_HTTP;
            return false;
        }
        c->state = CHUNK_SIZE;
    } else if (empty) {
        c->state = COMPLETE;
    }
    consume(&c->raw, (size_t)(end + 2 - c->raw.data));
    return true;
}

static void on_end(struct conn *c) {
    if (!c->busy) {
        disconnect(c); /* a server may close an idle connection */
    } else if (c->connecting) {
        not_before = now_us() + 10000;
        finish(c, CONNECT);
    } else if (c->rested && !c->answered) { /* the server closed an idle connection just as the request left: send it again */
        long long due = c->due;
        resent++;
        disconnect(c);
        started--;
        start(c, due);
    } else if (c->state == TO_CLOSE) {
        finish(c, check_whole(c));
    } else {
        finish(c, c->state == HEAD ? NO_ANSWER : c->status == 200 ? CUT : STATUS);
    }
}

static void receive(struct conn *c) {
    reserve(&c->raw, READ_SIZE + 1);
    ssize_t n = recv(c->fd, c->raw.data + c->raw.len, READ_SIZE, 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n <= 0) {
        on_end(c);
        return;
    }
    if (!c->busy) { /* bytes that nobody asked for */
        faults[BAD_HTTP]++;
        disconnect(c);
        return;
    }
    c->answered = true;
    c->raw.len += (size_t)n;
    c->raw.data[c->raw.len] = 0;
    while (step(c)) {}
    if (c->fault == BAD_HTTP) {
        finish(c, BAD_HTTP);
    } else if (c->state == COMPLETE) {
        if (c->raw.len) c->fault = BAD_HTTP;
        finish(c, c->fault ? c->fault : check_whole(c));
    }
}

static void on_ready(struct conn *c, unsigned what) {
    if (c->fd < 0) return;
    if (c->connecting && what & (EPOLLOUT | EPOLLERR | EPOLLHUP)) {
        int error = 0;
        socklen_t len = sizeof error;
        getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &error, &len);
        if (error) {
            on_end(c);
            return;
        }
        c->connecting = false;
        watch(c, EPOLL_CTL_MOD, true);
    }
    if (what & EPOLLOUT && c->busy) send_request(c);
    if (c->fd >= 0 && what & (EPOLLIN | EPOLLHUP | EPOLLERR | EPOLLRDHUP)) receive(c);
}

/* The run. */

static long long earlier(long long a, long long b) {
    return a < b ? a : b;
}

static long long due_at(long n) {
    return begin + (long long)((double)n * 1e6 / rate);
}

/* epoll counts in milliseconds, which is too coarse for a rate. Setting the timer also clears an expiry not yet read. */
static void set_timer(long long at) {
    struct itimerspec once = {.it_value = {at / 1000000, at % 1000000 * 1000}};
    if (timerfd_settime(timer, TFD_TIMER_ABSTIME, &once, NULL)) die("timerfd_settime");
}

static void dispatch(long long now, long long end) {
    while (idle && now >= not_before && (request_limit < 0 || started < request_limit)) {
        long long due = rate > 0 ? due_at(started) : now;
        if (due > now || due >= end) return;
        struct conn *c = idle;
        idle = c->next_idle;
        start(c, due);
    }
}

static void check_timeouts(long long now) {
    for (int i = 0; i < connections; i++)
        if (conns[i].busy && now > conns[i].deadline) finish(&conns[i], TIMEOUT);
}

static void run(void) {
    begin = now_us();
    long long end = request_limit >= 0 ? begin + (long long)4e15 : begin + (long long)(seconds * 1e6), timeouts_at = begin;
    struct epoll_event ready[512];
    for (;;) {
        long long now = now_us();
        dispatch(now, end);
        bool more = request_limit >= 0 ? started < request_limit : now < end;
        if (!more && (finished == started || !drain)) return;
        long long wake = now + 100000;
        if (rate > 0 && more && idle) wake = earlier(wake, due_at(started));
        if (more) wake = earlier(wake, end);
        if (now < not_before) wake = earlier(wake, not_before);
        set_timer(wake);
        int n = epoll_wait(epoll, ready, 512, -1);
        for (int i = 0; i < n; i++)
            if (ready[i].data.ptr) on_ready(ready[i].data.ptr, ready[i].events); /* else the timer, which is set anew */
        if ((now = now_us()) > timeouts_at) {
            check_timeouts(now);
            timeouts_at = now + 500000;
        }
    }
}

static int by_value(const void *a, const void *b) {
    unsigned x = *(const unsigned *)a, y = *(const unsigned *)b;
    return (x > y) - (x < y);
}

static void print_samples(const char *name, struct samples *s) {
    if (s->len) qsort(s->us, s->len, sizeof *s->us, by_value);
#define AT(q) (s->len ? s->us[(size_t)((double)(s->len - 1) * (q))] : 0u)
    printf(",\"%s\":{\"count\":%zu,\"p50\":%u,\"p99\":%u,\"max\":%u}", name, s->len, AT(0.5), AT(0.99), AT(1.0));
#undef AT
}

static void report(double elapsed) {
    long errors = 0, answers = good_plain + good_streams + broken_streams;
    const char *comma = "";
    for (int i = 1; i < FAULTS; i++) errors += faults[i];
    printf("{\"seconds\":%.3f,\"requests\":%ld,\"plain\":%ld,\"streams\":%ld,\"broken_streams\":%ld,\"chunks\":%ld,\"bytes\":%lld,\"rps\":%.1f,\"resent\":%ld,\"errors\":%ld,\"faults\":{",
           elapsed, answers + errors, good_plain, good_streams, broken_streams, chunks, bytes, (double)answers / elapsed, resent, errors);
    for (int i = 1; i < FAULTS; i++)
        if (faults[i]) comma = (printf("%s\"%s\":%ld", comma, fault_names[i], faults[i]), ",");
    printf("},\"statuses\":{");
    comma = "";
    for (int i = 0; i < 600; i++)
        if (statuses[i]) comma = (printf("%s\"%d\":%ld", comma, i, statuses[i]), ",");
    printf("},\"workers\":{");
    comma = "";
    for (int i = 0; i < MAX_WORKERS && workers[i].name[0]; i++) comma = (printf("%s\"%s\":%ld", comma, workers[i].name, workers[i].answers), ",");
    printf("}");
    print_samples("latency_us", &latency);
    print_samples("first_event_us", &first_event);
    print_samples("event_delay_us", &event_delay);
    printf("}\n");
}

int main(int argc, char **argv) {
    static const struct option options[] = {
        {"port", 1, 0, 'p'},    {"connections", 1, 0, 'c'}, {"seconds", 1, 0, 's'},      {"requests", 1, 0, 'n'}, {"rate", 1, 0, 'r'},    {"stream-share", 1, 0, 'S'},
        {"prompts", 1, 0, 'k'}, {"body-bytes", 1, 0, 'b'},  {"timeout-s", 1, 0, 't'},    {"model", 1, 0, 'm'},    {"path", 1, 0, 'u'},    {"drain", 0, 0, 'd'},
        {"key", 1, 0, 'K'},
        {0, 0, 0, 0},
    };
    int o;
    while ((o = getopt_long(argc, argv, "", options, NULL)) != -1) {
        switch (o) {
        case 'p': port = atoi(optarg); break;
        case 'c': connections = atoi(optarg); break;
        case 's': seconds = atof(optarg); break;
        case 'n': request_limit = atol(optarg); break;
        case 'r': rate = atof(optarg); break;
        case 'S': stream_share = atof(optarg); break;
        case 'k': prompts = atoi(optarg); break;
        case 'b': body_bytes = atoi(optarg); break;
        case 't': timeout_s = atoi(optarg); break;
        case 'm': model = optarg; break;
        case 'u': path = optarg; break;
        case 'd': drain = true; break;
        case 'K': api_key = optarg; break;
        default:
            fprintf(stderr,
                    "usage: load [--port 8087] [--connections 32] [--seconds 8 | --requests N] [--rate PER_SECOND] [--stream-share 0..1]\n"
                    "            [--prompts 64] [--body-bytes 2048] [--timeout-s 30] [--model m] [--path PATH] [--key KEY] [--drain]\n"
                    "--drain waits at the end for the answers under way (--requests always does).\n");
            return 2;
        }
    }
    if (connections < 1 || prompts < 1 || prompts > MAX_PROMPTS || stream_share < 0 || stream_share > 1 || rate < 0 || seconds <= 0) {
        fprintf(stderr, "load: an option is out of range\n");
        return 2;
    }
    if (request_limit >= 0) drain = true;
    signal(SIGPIPE, SIG_IGN);
    write_requests();
    epoll = epoll_create1(EPOLL_CLOEXEC);
    timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    struct epoll_event e = {.events = EPOLLIN, .data.ptr = NULL};
    if (epoll_ctl(epoll, EPOLL_CTL_ADD, timer, &e)) die("epoll_ctl");
    conns = calloc((size_t)connections, sizeof *conns);
    if (!conns) die("calloc");
    for (int i = connections - 1; i >= 0; i--) {
        conns[i].fd = -1;
        release(&conns[i]);
    }
    run();
    report((double)(now_us() - begin) / 1e6);
    return 0;
}
