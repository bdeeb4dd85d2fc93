"""Heads: which headers pass a proxy, which ones are the gateway's own, and where the body of a response ends."""

import pytest

from pointsman.wire.http1 import (
    HOP_BY_HOP,
    KEPT_BYTES,
    Framing,
    Headers,
    ProtocolError,
    ResponseHead,
    identity_of,
    parse_response_head,
    render_request,
    render_response,
    status_line,
    traceparent,
)

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
RANDOM = "a" * 32 + "b" * 16
NEW_TRACE = f"00-{'a' * 32}-{'b' * 16}-01".encode()


def head(*lines: bytes, status: bytes = b"HTTP/1.1 200 OK") -> ResponseHead:
    return parse_response_head(b"\r\n".join((status, *lines, b"", b"")))


def upstream(*headers: tuple[bytes, bytes]) -> list[bytes]:
    """Return the header lines that an engine gets for a client's."""
    return render_request(list(headers), "req-1", RANDOM)[0].split(b"\r\n")[:-1]


def downstream(*lines: bytes) -> list[bytes]:
    """Return the header lines that a client gets for an engine's, without ours."""
    return render_response(head(*lines), b"", b"").split(b"\r\n")[1:-2]


OURS = [b"x-request-id: req-1", b"traceparent: " + NEW_TRACE]


class TestRequests:
    def test_end_to_end_headers_pass_in_their_order(self) -> None:
        lines = upstream((b"accept", b"*/*"), (b"x-one", b"1"), (b"accept", b"text/plain"))
        assert lines == [b"accept: */*", b"x-one: 1", b"accept: text/plain", *OURS]

    @pytest.mark.parametrize("name", sorted(HOP_BY_HOP))
    def test_hop_by_hop_headers_stay_here(self, name: bytes) -> None:
        assert upstream((name, b"x"), (b"a", b"b")) == [b"a: b", *OURS]

    @pytest.mark.parametrize("value", [b"keep-alive", b"Keep-Alive", b"KEEP-ALIVE", b"close"])
    def test_the_usual_connection_headers_name_nothing(self, value: bytes) -> None:
        assert upstream((b"connection", value), (b"a", b"b")) == [b"a: b", *OURS]

    @pytest.mark.parametrize("name", [b"host", b"content-length", b"expect"])
    def test_headers_of_the_attempt_are_left_to_it(self, name: bytes) -> None:
        assert upstream((name, b"1")) == OURS

    @pytest.mark.parametrize(
        "name", [b"authorization", b"proxy-authorization", b"x-api-key", b"api-key"]
    )
    def test_h08_credentials_never_reach_the_engine(self, name: bytes) -> None:
        assert upstream((name, b"Bearer secret"), (name, b"Bearer again")) == OURS

    @pytest.mark.parametrize("name", [b"x-tl-priority", b"x-tl-kv-handle", b"x-tl-route", b"x-tl-"])
    def test_internal_headers_of_clients_are_forged_ones(self, name: bytes) -> None:
        assert upstream((name, b"forged")) == OURS

    def test_h08_headers_that_connection_names_are_hop_by_hop_too(self) -> None:
        lines = upstream(
            (b"x-before", b"1"),
            (b"connection", b"close, X-Before ,x-after"),
            (b"x-after", b"2"),
            (b"x-stays", b"3"),
            (b"connection", b"x-last,"),
            (b"x-last", b"4"),
        )
        assert lines == [b"x-stays: 3", *OURS]

    def test_connection_cannot_name_what_the_body_needs_or_what_is_ours(self) -> None:
        lines = upstream(
            (b"content-type", b"application/json"),
            (b"content-encoding", b"gzip"),
            (b"connection", b"content-type, content-encoding, x-request-id, traceparent"),
            (b"x-request-id", b"theirs"),
        )
        assert lines == [b"content-type: application/json", b"content-encoding: gzip", *OURS]

    def test_bytes_beyond_ascii_pass(self) -> None:
        value = bytes(range(0x80, 0x100))
        assert upstream((b"x-name", value))[0] == b"x-name: " + value

    def test_a_valid_trace_goes_on_with_a_span_of_ours(self) -> None:
        lines = upstream((b"traceparent", PARENT), (b"tracestate", b"a=1"), (b"tracestate", b"b=2"))
        span = f"traceparent: 00-{TRACE}-{'b' * 16}-01".encode()
        assert lines == [b"x-request-id: req-1", span, b"tracestate: a=1,b=2"]

    def test_the_state_of_an_invalid_trace_is_dropped(self) -> None:
        assert upstream((b"traceparent", b"00-zz"), (b"tracestate", b"a=1")) == OURS
        assert upstream((b"tracestate", b"a=1")) == OURS

    def test_two_traceparents_are_none(self) -> None:
        assert upstream((b"traceparent", PARENT), (b"traceparent", PARENT)) == OURS


class TestTraces:
    def test_the_flags_are_kept(self) -> None:
        unsampled = PARENT[:-2] + b"00"
        assert traceparent(unsampled, RANDOM) == (
            f"00-{TRACE}-{'b' * 16}-00".encode(),
            True,
        )

    @pytest.mark.parametrize(
        "incoming",
        [
            None,
            b"",
            PARENT.upper(),
            PARENT.replace(b"00-", b"01-", 1),
            PARENT.replace(b"00-", b"ff-", 1),
            PARENT + b"-extra",
            PARENT + b" ",
            PARENT + b"\n",
            PARENT[:-1],
            b"00-" + b"0" * 32 + b"-b7ad6b7169203331-01",
            b"00-" + TRACE.encode() + b"-" + b"0" * 16 + b"-01",
            PARENT.replace(b"-", b"_"),
        ],
    )
    def test_anything_else_starts_a_new_trace(self, incoming: bytes | None) -> None:
        assert traceparent(incoming, RANDOM) == (NEW_TRACE, False)


class TestRequestIds:
    @pytest.mark.parametrize("value", [b"a", b"~" * 128, b"!{}", b"abc-123"])
    def test_a_visible_one_of_1_to_128_bytes_is_kept(self, value: bytes) -> None:
        assert identity_of([(b"x-request-id", value)])[0] == value.decode()

    def test_space_around_it_is_no_part_of_it(self) -> None:
        assert identity_of([(b"x-request-id", b"abc \t")])[0] == "abc"

    @pytest.mark.parametrize("value", [b"", b"a" * 129, b"a b", b"a\x7f", b"\xc3\xa9", b"a\tb"])
    def test_any_other_is_not(self, value: bytes) -> None:
        assert identity_of([(b"x-request-id", value)])[0] is None

    def test_the_first_good_one_counts(self) -> None:
        headers: Headers = [
            (b"accept", b"a"),
            (b"x-request-id", b"not good"),
            (b"x-request-id", b"b"),
        ]
        assert identity_of(headers)[0] == "b"
        assert identity_of([]) == (None, None)


class TestKeys:
    @pytest.mark.parametrize(
        ("headers", "authorization"),
        [
            ([], None),
            ([(b"authorization", b"Bearer a")], b"Bearer a"),
            ([(b"authorization", b"Bearer a")] * 2, b""),
            ([(b"x-api-key", b" a\t")], b"Bearer a"),
            ([(b"x-api-key", b"a"), (b"authorization", b"Bearer a")], b"Bearer a"),
            ([(b"authorization", b"Bearer a"), (b"x-api-key", b"a")], b"Bearer a"),
            ([(b"x-api-key", b"a"), (b"authorization", b"Bearer b")], b""),
            ([(b"x-api-key", b"a"), (b"authorization", b"Basic a")], b""),
            ([(b"x-api-key", b"a"), (b"x-api-key", b"b")], b"Bearer "),
            ([(b"api-key", b"a")], None),
        ],
    )
    def test_of_keys_that_differ_none_counts(
        self, headers: Headers, authorization: bytes | None
    ) -> None:
        assert identity_of(headers)[1] == authorization


class TestResponses:
    def test_end_to_end_headers_pass_and_ours_follow(self) -> None:
        answer = head(b"Server: uvicorn", b"Date: today", b"Content-Type: text/plain")
        assert render_response(answer, b"x-request-id: r\r\nconnection: close\r\n", b"") == (
            b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ndate: today\r\ncontent-type: text/plain\r\n"
            b"x-request-id: r\r\nconnection: close\r\n\r\n"
        )

    @pytest.mark.parametrize("name", sorted(HOP_BY_HOP - {b"transfer-encoding"}))
    def test_hop_by_hop_headers_stay_here(self, name: bytes) -> None:
        assert downstream(name + b": x", b"a: b") == [b"a: b"]

    def test_framing_and_request_id_are_the_gateways(self) -> None:
        assert downstream(b"content-length: 2", b"x-request-id: engine's") == []
        assert downstream(b"transfer-encoding: chunked") == []

    def test_internal_headers_of_engines_stay_here(self) -> None:
        assert downstream(b"X-TL-Route: worker-7", b"x-tl-cache: hit", b"x-other: 1") == [
            b"x-other: 1"
        ]

    def test_h08_headers_that_any_connection_header_names_are_hop_by_hop_too(self) -> None:
        lines = downstream(
            b"x-a: 1",
            b"connection: keep-alive, X-A",
            b"x-b: 2",
            b"connection: x-b, content-type",
            b"content-type: text/plain",
        )
        assert lines == [b"content-type: text/plain"]

    def test_h08_no_header_appears_more_often_than_the_engine_sent_it(self) -> None:
        lines = downstream(b"server: uvicorn", b"set-cookie: a=1", b"set-cookie: b=2")
        assert lines == [b"server: uvicorn", b"set-cookie: a=1", b"set-cookie: b=2"]

    def test_bytes_beyond_ascii_pass(self) -> None:
        value = bytes(range(0x80, 0x100))
        assert downstream(b"x-name: " + value) == [b"x-name: " + value]

    @pytest.mark.parametrize(
        ("status", "line"),
        [
            (200, b"HTTP/1.1 200 OK\r\n"),
            (429, b"HTTP/1.1 429 Too Many Requests\r\n"),
            (299, b"HTTP/1.1 299 Status\r\n"),
            (999, b"HTTP/1.1 999 Status\r\n"),
        ],
    )
    def test_every_status_has_its_line(self, status: int, line: bytes) -> None:
        assert status_line(status) == line


class TestWhereABodyEnds:
    def test_a_length_counts(self) -> None:
        answer = head(b"Content-Length: 12 ")
        assert (answer.framing, answer.length, answer.reusable) == (Framing.COUNTED, 12, True)

    def test_an_empty_counted_body_keeps_its_connection(self) -> None:
        answer = head(b"content-length: 0")
        assert (answer.framing, answer.length, answer.reusable) == (Framing.COUNTED, 0, True)

    @pytest.mark.parametrize("coding", [b"chunked", b"Chunked", b"CHUNKED"])
    def test_chunks_end_themselves(self, coding: bytes) -> None:
        answer = head(b"transfer-encoding: " + coding)
        assert (answer.framing, answer.length, answer.reusable) == (Framing.CHUNKED, 0, True)

    def test_neither_lasts_until_the_connection_closes(self) -> None:
        answer = head(b"content-type: text/plain")
        assert (answer.framing, answer.length, answer.reusable) == (Framing.UNTIL_CLOSE, 0, False)

    @pytest.mark.parametrize("status", [b"HTTP/1.1 204 No Content", b"HTTP/1.1 304 Not Modified"])
    @pytest.mark.parametrize("line", [b"content-length: 5", b"transfer-encoding: chunked", b"a: b"])
    def test_204_and_304_have_none_whatever_they_say(self, status: bytes, line: bytes) -> None:
        answer = head(line, status=status)
        assert (answer.framing, answer.length) == (Framing.NONE, 0)
        assert answer.reusable

    @pytest.mark.parametrize("body", [b"content-length: 0", b"content-length: 3"])
    @pytest.mark.parametrize("value", [b"close", b"Close", b"x, close"])
    def test_close_is_not_reused(self, value: bytes, body: bytes) -> None:
        assert not head(b"connection: " + value, body).reusable

    def test_http_1_0_is_not_reused(self) -> None:
        status = b"HTTP/1.0 200 OK"
        assert not head(b"connection: keep-alive", b"content-length: 3", status=status).reusable
        assert head(status=status).framing is Framing.UNTIL_CLOSE

    def test_an_invitation_to_upgrade_changes_nothing(self) -> None:
        answer = head(b"connection: upgrade", b"upgrade: h2c", b"content-length: 2")
        assert (answer.framing, answer.reusable) == (Framing.COUNTED, True)

    @pytest.mark.parametrize(
        "lines",
        [
            (b"content-length: 2", b"transfer-encoding: chunked"),
            (b"transfer-encoding: chunked", b"content-length: 2"),
            (b"content-length: 2", b"content-length: 2"),
            (b"content-length: 2", b"content-length: 3"),
            (b"content-length: 2, 2",),
            (b"content-length: +2",),
            (b"content-length: -2",),
            (b"content-length: 0x2",),
            (b"content-length: 1_0",),
            (b"content-length: 2 2",),
            (b"content-length:",),
            (b"content-length: 99999999999999999999999",),
            (b"transfer-encoding: gzip, chunked",),
            (b"transfer-encoding: chunked, gzip",),
            (b"transfer-encoding: gzip",),
            (b"transfer-encoding: gzip", b"transfer-encoding: chunked"),
            (b"transfer-encoding: chunked", b"transfer-encoding: chunked"),
            (b"transfer-encoding: identity",),
            (b"transfer-encoding:",),
        ],
    )
    def test_ambiguous_framing_is_refused(self, lines: tuple[bytes, ...]) -> None:
        with pytest.raises(ProtocolError):
            head(*lines)


class TestOddHeads:
    @pytest.mark.parametrize(
        "status", [b"HTTP/1.1 200", b"HTTP/1.1 200 ", b"HTTP/1.1 200 \xe9t\xe9", b"HTTP/1.0 200 OK"]
    )
    def test_odd_but_valid_status_lines(self, status: bytes) -> None:
        assert head(status=status).status == 200

    @pytest.mark.parametrize("status", [100, 102, 103, 199])
    def test_interim_heads_are_read_like_others(self, status: int) -> None:
        assert head(b"link: x", status=b"HTTP/1.1 %d Wait" % status).status == status

    @pytest.mark.parametrize(
        "status",
        [
            b"",
            b"HTTP/0.9 200 OK",
            b"HTTP/1.2 200 OK",
            b"HTTP/2.0 200 OK",
            b"HTTP/3 200 OK",
            b"RTSP/1.0 200 OK",
            b"ICY 200 OK",
            b"GET / HTTP/1.1",
            b"HTTP/1.1 000 Zero",
            b"HTTP/1.1 099 Low",
            b"HTTP/1.1 99 Short",
            b"HTTP/1.1 1000 Long",
            b"HTTP/1.1 2OO Letters",
            b"\r\nHTTP/1.1 200 OK",
        ],
    )
    def test_other_status_lines_are_refused(self, status: bytes) -> None:
        with pytest.raises(ProtocolError):
            head(status=status)

    @pytest.mark.parametrize("lines", [(), (b"connection: upgrade", b"upgrade: websocket")])
    def test_101_is_refused_since_nobody_asked(self, lines: tuple[bytes, ...]) -> None:
        with pytest.raises(ProtocolError):
            head(*lines, status=b"HTTP/1.1 101 Switching Protocols")

    @pytest.mark.parametrize(
        "line",
        [
            b"a: b\r\n folded",
            b"a: b\r\n\tfolded",
            b"a: b\nc: d",
            b"a: b\rc",
            b"a : b",
            b" a: b",
            b"a: \x00",
            b": b",
            b"a\xe9: b",
            b"a b: c",
            b"nothing",
        ],
    )
    def test_malformed_headers_are_refused(self, line: bytes) -> None:
        with pytest.raises(ProtocolError):
            head(line)

    def test_a_head_that_stops_is_refused(self) -> None:
        with pytest.raises(ProtocolError, match="incomplete"):
            parse_response_head(b"HTTP/1.1 200 OK\r\na: b\r\n")

    def test_a_large_head_is_read_like_a_small_one(self) -> None:
        value = b"v" * KEPT_BYTES
        assert head(b"x-large: " + value).get(b"x-large") == value

    def test_what_a_body_is_called(self) -> None:
        assert head(b"Content-Type: Text/Event-Stream; charset=utf-8").event_stream
        assert not head(b"content-type: application/json").event_stream
        assert head(b"content-encoding: gzip").encoded
        assert not head(b"content-encoding: Identity").encoded
        assert not head().encoded

    def test_a_header_is_found_by_its_name(self) -> None:
        answer = head(b"A: 1", b"B: 2", b"A: 3")
        assert (answer.get(b"a"), answer.get(b"b"), answer.get(b"c")) == (b"1", b"2", None)
