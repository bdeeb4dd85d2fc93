"""Bytes go straight to the socket, in order, and never to somebody else's."""

import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from pointsman.net.sending import sender


class Transport:
    """A transport over one end of a socket pair, with a queue that the test can see."""

    def __init__(self, raw: socket.socket | None, sslcontext: object = None) -> None:
        self._extra = {"socket": raw, "sslcontext": sslcontext}
        self.queue = b""
        self.closing = False
        self.limits: list[int] = []

    def get_extra_info(self, name: str) -> Any:
        return self._extra[name]

    def write(self, data: bytes) -> None:
        self.queue += data

    def set_write_buffer_limits(self, high: int) -> None:
        self.limits.append(high)

    def set_read_buffer_limits(self, high: int) -> None:
        self.limits.append(high)

    def get_write_buffer_size(self) -> int:
        return len(self.queue)

    def is_closing(self) -> bool:
        return self.closing


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    near.setblocking(False)
    with near, far:
        yield near, far


def send_to(transport: Transport) -> Any:
    return sender(transport)  # type: ignore[arg-type]


def test_bytes_go_to_the_socket_at_once(pair: tuple[socket.socket, socket.socket]) -> None:
    transport = Transport(pair[0])
    send_to(transport)(b"abc")
    assert pair[1].recv(10) == b"abc"
    assert transport.queue == b""


def test_what_the_kernel_does_not_take_is_queued_and_nothing_overtakes_it(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    near, far = pair
    transport = Transport(near)
    send = send_to(transport)
    big = os.urandom(4 << 20)
    send(big)
    assert 0 < len(transport.queue) < len(big)
    far.setblocking(False)
    got = b""
    while len(got) + len(transport.queue) < len(big):
        got += far.recv(1 << 20)
    send(b"later")
    assert got + transport.queue == big + b"later"


def test_nothing_is_written_to_the_descriptor_of_a_closing_transport(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    near, far = pair
    transport = Transport(near)
    send = send_to(transport)
    transport.closing = True
    send(b"abc")
    far.setblocking(False)
    with pytest.raises(BlockingIOError):
        far.recv(10)
    assert transport.queue == b"abc"


def test_a_broken_socket_is_left_to_the_transport(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    near, far = pair
    far.close()
    transport = Transport(near)
    send_to(transport)(b"abc")
    assert transport.queue == b"abc"


def test_a_transport_that_encrypts_writes_itself(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    for transport in (Transport(pair[0], sslcontext=object()), Transport(None)):
        assert send_to(transport) == transport.write


def test_a_transport_that_encrypts_buffers_no_more_than_a_plain_one(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    encrypting, plain = Transport(pair[0], sslcontext=object()), Transport(pair[0])
    send_to(encrypting)
    send_to(plain)
    assert (encrypting.limits, plain.limits) == ([65536, 1], [])
