"""Server-Sent Events: cut at blank lines wherever the bytes are split, read by their data lines, told when they end."""

import time

import pytest

from pointsman.wire.sse import (
    DONE,
    ERROR_EVENT,
    EventCut,
    data_of,
    ends_event,
    ends_stream,
    with_data,
)

VARIANTS = {
    "LF": [b"data: one\n\n", b"data: two\n\n"],
    "CRLF": [b"data: one\r\n\r\n", b"data: two\r\n\r\n"],
    "mixed": [b"data: one\r\n\n", b"data: two\n\r\n", b"data: three\r\r\n", b"data: 4\n\n"],
    "no space": [b"data:one\n\n", b"data:two\n\n"],
    "several lines": [b"data: one\ndata: two\n\n", b"data: three\r\ndata:\r\n\r\n"],
    "comments": [b": ping\n\n", b": ping\ndata: one\n: pong\n\n"],
    "other fields": [b"event: x\nid: 7\nretry: 10\ndata: one\n\n", b"id: 8\ndata: two\n\n"],
    "multibyte": ["data: 北京 \U0001f600\n\n".encode(), "data: é\n\n".encode()],
    "separators that are none": ["data: a\u2028b\x85c\x0bd\n\n".encode(), b"data: e\n\n"],
    "usage in every chunk": [
        b'data: {"choices":[{}],"usage":{"total_tokens":1}}\n\n',
        b'data: {"choices":[{}],"usage":{"total_tokens":2}}\n\n',
        b"data: [DONE]\n\n",
    ],
}

CARRIAGE_RETURNS = [b"data: one\r\r", b"data: two\r\r", b": three\r\r"]


def cut_into(pieces: list[bytes]) -> list[bytes]:
    cut = EventCut()
    return [event for piece in pieces for event in cut.feed(piece)]


class TestCutting:
    @pytest.mark.parametrize("events", VARIANTS.values(), ids=VARIANTS)
    def test_s02_every_variant_at_every_cut(self, events: list[bytes]) -> None:
        stream = b"".join(events)
        for at in range(len(stream) + 1):
            assert cut_into([stream[:at], stream[at:]]) == events

    @pytest.mark.parametrize("events", VARIANTS.values(), ids=VARIANTS)
    def test_s01_every_variant_byte_by_byte(self, events: list[bytes]) -> None:
        stream = b"".join(events)
        assert cut_into([stream[at : at + 1] for at in range(len(stream))]) == events

    def test_s02_lone_carriage_returns_end_lines_once_the_next_byte_is_here(self) -> None:
        stream = b"".join(CARRIAGE_RETURNS)
        for at in range(len(stream) + 1):
            cut = EventCut()
            events = cut.feed(stream[:at]) + cut.feed(stream[at:])
            assert events == CARRIAGE_RETURNS[:-1]
            assert cut.rest() == CARRIAGE_RETURNS[-1]

    def test_a_carriage_return_at_the_end_may_be_half_of_a_line_end(self) -> None:
        cut = EventCut()
        assert cut.feed(b"data: a\n\r") == []
        assert cut.feed(b"\ndata: b\r") == [b"data: a\n\r\n"]
        assert cut.feed(b"\n") == []
        assert cut.feed(b"\r") == []
        assert cut.feed(b"\n") == [b"data: b\r\n\r\n"]

    def test_s17_what_never_ended_is_the_rest(self) -> None:
        cut = EventCut()
        assert cut.feed(b"data: a\n\ndata: b\n") == [b"data: a\n\n"]
        assert cut.rest() == b"data: b\n"
        assert cut.rest() == b""
        assert cut.feed(b"\n\n") == [b"\n\n"]

    def test_s12_an_event_over_the_limit_comes_in_pieces(self) -> None:
        cut = EventCut(limit=10)
        assert cut.feed(b"data: 0123") == []
        assert cut.feed(b"4") == [b"data: 01234"]
        assert cut.feed(b"5\n\ndata: x\n\n") == [b"5\n\n", b"data: x\n\n"]
        assert cut.rest() == b""

    @pytest.mark.slow
    def test_an_endless_event_costs_no_more_per_byte_than_a_short_one(self) -> None:
        cut = EventCut()
        began = time.process_time()
        for _ in range(300_000):
            cut.feed(b"xxxxxxxx")
        assert len(cut.rest()) == 2_400_000
        assert time.process_time() - began < 5


class TestData:
    @pytest.mark.parametrize(
        ("event", "data"),
        [
            (b"data: a\n\n", b"a"),
            (b"data:a\n\n", b"a"),
            (b"data:  a\n\n", b" a"),
            (b"data:\ta\n\n", b"\ta"),
            (b"data: a\r\ndata: b\r\n\r\n", b"a\nb"),
            (b"data: a\rdata: b\r\r", b"a\nb"),
            (b"data\n\n", b""),
            (b"data", b""),
            (b"data:\n\n", b""),
            (b"data: a\ndata\ndata: b\n\n", b"a\n\nb"),
            (b"event: x\ndata: a: b\nid: 1\n\n", b"a: b"),
            (b": data: no\n\n", None),
            (b"data2: no\n\n", None),
            (b"mydata: no\n\n", None),
            (b"data : no\n\n", None),
            (b" data: no\n\n", None),
            (b"DATA: no\n\n", None),
            (b"id: 1\n\n", None),
            (b"\n\n", None),
            (b"", None),
            ("data: a\u2028data: b\n\n".encode(), "a\u2028data: b".encode()),
            (b"data: " + DONE + b"\n\n", DONE),
        ],
    )
    def test_s02_data_lines_and_nothing_else(self, event: bytes, data: bytes | None) -> None:
        assert data_of(event) == data

    def test_only_the_data_changes(self) -> None:
        event = b": a\r\ndata:a\rid: a\ndata: b\n\n"
        assert with_data(event, b"AAA\nB") == b": a\r\ndata:AAA\rid: a\ndata: B\n\n"

    def test_an_event_keeps_its_number_of_lines(self) -> None:
        with pytest.raises(ValueError, match="shorter"):
            with_data(b"data: a\ndata: b\n\n", b"a")

    def test_an_empty_line_without_a_colon_stays(self) -> None:
        assert with_data(b"data\ndata: b\n\n", b"\nB") == b"data\ndata: B\n\n"


class TestEnds:
    LINE_ENDS = (b"\n", b"\r\n", b"\r")

    @pytest.mark.parametrize("first", LINE_ENDS)
    @pytest.mark.parametrize("second", LINE_ENDS)
    def test_two_line_ends_end_an_event(self, first: bytes, second: bytes) -> None:
        one = first + second == b"\r\n"
        assert ends_event(b"data: x" + first + second) is not one

    @pytest.mark.parametrize("tail", [b"", b"data: x", b"data: x\n", b"data: x\r\n", b"data: x\r"])
    def test_less_does_not(self, tail: bytes) -> None:
        assert not ends_event(tail)

    @pytest.mark.parametrize(
        "last",
        [
            b"data: [DONE]",
            b"data:[DONE]",
            b"event: message_stop\ndata: {}",
            b"event:message_stop\r\ndata: {}",
            b'event: response.completed\ndata: {"response":{}}',
            b"event: response.failed\ndata: {}",
            b"event: response.incomplete\ndata: {}",
            b'event: error\ndata: {"error":{}}',
        ],
    )
    @pytest.mark.parametrize("end", [b"", b"\n", b"\n\n", b"\r\n\r\n", b"\r\r"])
    def test_the_last_events_of_the_apis_end_a_stream(self, last: bytes, end: bytes) -> None:
        assert ends_stream(last + end)
        assert ends_stream(b"data: {}\n\n" + last + end)
        assert ends_stream(b"data: {}\r\n\r\n" + last + end)
        assert not ends_stream(last + end + b"\n\ndata: {}\n\n")

    @pytest.mark.parametrize(
        "tail",
        [
            b"",
            b"data: {}\n\n",
            b'data: {"text":"data: [DONE]',
            b'data: {"text":"data: [DONE]"}\n\n',
            b'data: {"text":"\\n\\ndata: [DONE]\\n\\n',
            b"data:  [DONE]\n\n",
            b": data: [DONE]\n\n",
            b"mydata: [DONE]\n\n",
            b"data: [DONE]!\n\n",
            b'data: {"choices":[],"usage":{"total_tokens":3}}\n\n',
            b"event: message_stop\n\n",
            b"event: message_delta\ndata: {}\n\n",
            b"event: message_stopped\ndata: {}\n\n",
        ],
    )
    def test_s03_s04_text_and_usage_do_not(self, tail: bytes) -> None:
        assert not ends_stream(tail)

    @pytest.mark.slow
    def test_a_hostile_tail_takes_no_longer(self) -> None:
        began = time.process_time()
        for tail in (b"\n", b"event: error\n", b"event: error\ndata:", b"data: [DONE]\n", b"\r"):
            ends_stream(tail * (65536 // len(tail)) + b"x")
        assert time.process_time() - began < 1


def test_the_error_event_is_the_one_of_the_contract() -> None:
    assert ERROR_EVENT == (
        b'data: {"error":{"message":"the upstream stream failed","type":"server_error","param":null,"code":null}}\n\n'
    )
