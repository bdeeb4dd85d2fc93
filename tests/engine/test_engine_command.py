"""The parts of the command that need no model: its loop's thread, its socket, its signals."""

import socket
import threading
from typing import Any

import pytest

from pointsman.engine.command import _address, _computing, _listener


class Dying:
    """A scheduler whose loop raises."""

    def run(self) -> None:
        raise RuntimeError("out of memory")

    def stop(self) -> None:
        pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_loop_that_dies_is_told_so_that_the_worker_leaves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told = threading.Event()
    scheduler: Any = Dying()
    with _computing(scheduler, told.set) as failed:
        assert told.wait(5)
        assert failed.is_set()
    assert "the scheduling loop has died" in caplog.text


def test_a_loop_that_is_stopped_has_not_failed(fakes: Any) -> None:
    from pointsman.engine.scheduler import Scheduler

    scheduler = Scheduler(fakes.Machine(), fakes.Model(), slots=1, context=64, now=lambda: 0.0)
    with _computing(scheduler, lambda: None) as failed:
        pass
    assert not failed.is_set()


@pytest.mark.parametrize("listen", ["nowhere", "host:", "host:x", "127.0.0.1:65536", ":-1"])
def test_an_address_that_is_none_is_refused(listen: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        _listener(listen)


@pytest.mark.parametrize(("listen", "host"), [("127.0.0.1:0", "127.0.0.1"), (":0", "127.0.0.1")])
def test_port_0_is_told_as_the_port_it_became(listen: str, host: str) -> None:
    with _listener(listen) as listener:
        address = _address(listener)
        assert address == f"{host}:{listener.getsockname()[1]}"
        assert not address.endswith(":0")


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 on this machine")
def test_an_ipv6_address_keeps_its_brackets() -> None:
    with _listener("[::1]:0") as listener:
        assert _address(listener) == f"[::1]:{listener.getsockname()[1]}"
