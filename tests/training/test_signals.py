"""Signals: once is a request, twice is an order."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from helpers.ranks import ranks_running
from qmargin.errors import ConfigError
from qmargin.training.signals import ONE_REQUEST_S, StopRequest, exit_status

SIGNALS = [signal.SIGTERM, signal.SIGINT]


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_is_noted_and_handlers_come_back(number: signal.Signals) -> None:
    before = [signal.getsignal(each) for each in SIGNALS]
    with StopRequest() as request:
        assert request.number == 0
        os.kill(os.getpid(), number)
        assert request.number == number
    assert [signal.getsignal(each) for each in SIGNALS] == before
    descriptor = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(descriptor)
    assert descriptor == -1


def test_a_signal_passed_on_twice_is_one_request() -> None:
    statuses: list[int] = []
    with StopRequest(leave=statuses.append) as request:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert request.number == signal.SIGTERM
        time.sleep(0.05)
    assert statuses == []


def test_a_signal_that_a_training_had_no_use_for_is_passed_on() -> None:
    with StopRequest() as outer:
        with StopRequest():
            os.kill(os.getpid(), signal.SIGINT)
        assert outer.number == signal.SIGINT


def test_other_signals_and_other_threads_do_not_count() -> None:
    old = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    try:
        with StopRequest() as request:
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.05)
            assert request.number == 0
    finally:
        signal.signal(signal.SIGUSR1, old)
    with ThreadPoolExecutor() as pool, pytest.raises(ConfigError, match="main thread"):
        pool.submit(StopRequest().__enter__).result()


@pytest.mark.dist
@pytest.mark.parametrize("wait", ["time.sleep(1000)", "wait_in_torch()"])
def test_a_second_signal_is_obeyed_wherever_the_main_thread_is(wait: str) -> None:
    script = f"""
import torch.distributed as dist
from qmargin.training.signals import StopRequest
def wait_in_torch():  # a call that no Python handler can interrupt, as a collective is
    dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).get("never")
with StopRequest():
    say("ready")
    {wait}
"""
    with ranks_running(script, 1) as ranks:
        ranks[0].wait_for("ready")
        ranks[0].process.send_signal(signal.SIGTERM)
        time.sleep(2 * ONE_REQUEST_S)
        assert ranks[0].process.poll() is None
        ranks[0].process.send_signal(signal.SIGTERM)
        assert ranks[0].wait(5) == exit_status(signal.SIGTERM)


@pytest.mark.dist
@pytest.mark.slow
def test_data_workers_outlive_the_first_signal_to_the_whole_group() -> None:
    """Job managers and Ctrl-C signal every process; the rank still needs batches to finish."""
    script = """
from qmargin.data.loader import build_loader
from qmargin.data.order import GlobalOrder
from qmargin.data.synthetic import SyntheticIdentities
from qmargin.training.signals import StopRequest, exit_status
os.setpgrp()
order = GlobalOrder(64, seed=0, batch_size=8)
stream = build_loader(SyntheticIdentities(8, 8, shape=(4,)), order, num_workers=2)
with StopRequest() as request, stream:
    for batch in stream:
        if batch.step == 3:
            say("ready")
        if request.number:
            break
        time.sleep(0.001)
    for batch in range(40):
        last = next(stream).step
    say("read on")
    sys.exit(exit_status(request.number))
"""
    for number in SIGNALS:
        with ranks_running(script, 1) as ranks:
            ranks[0].wait_for("ready")
            os.killpg(ranks[0].process.pid, number)
            assert ranks[0].wait(20) == exit_status(number), ranks[0].errors()
            assert "read on" in ranks[0].output()
