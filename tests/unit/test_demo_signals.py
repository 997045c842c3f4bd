"""Ctrl-C while the demo does what must not be cut in two."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from rollcast_demo.signals import signals_held


@pytest.fixture(autouse=True)
def _ctrl_c_is_heard() -> Iterator[None]:
    # A shell that runs the tests in the background has it ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_signal_waits_for_the_end_of_the_block_whichever_thread_the_kernel_gives_it_to() -> None:
    done: list[str] = []

    def interrupted() -> None:
        with signals_held():
            other = threading.Thread(target=signal.raise_signal, args=(signal.SIGINT,))
            other.start()
            other.join()
            done.append("the whole block")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert done == ["the whole block"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_a_signal_nothing_is_raised_and_the_handlers_are_those_from_before() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with signals_held():
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] != before
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
