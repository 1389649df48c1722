"""One run per output folder."""

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from qmargin.errors import ConfigError
from qmargin.training.start import RunLock

HOST = socket.gethostname()
HOLD = """
import os, sys, time
from qmargin.training.start import RunLock
lock = RunLock(sys.argv[1])
lock.acquire()
child = os.fork()
if child == 0:  # said by the child, which has begun then
    print(os.getpid(), flush=True)
time.sleep(120)
"""


@contextmanager
def holding(folder: Path) -> Iterator[tuple[subprocess.Popen, int]]:
    """A process that holds the lock, and the process that it forked."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        child = int(process.stdout.readline())
        try:
            yield process, child
        finally:
            process.kill()
            os.kill(child, signal.SIGKILL)


def assert_refused(folder: Path, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RunLock(folder).acquire()


def test_a_second_run_is_refused_and_told_who_runs(tmp_path: Path) -> None:
    """Data workers may live on for seconds after a kill -9; the next run must not wait for them."""
    with holding(tmp_path) as (process, child):
        assert_refused(tmp_path, f"in use by process {process.pid} on {HOST}")
        process.kill()
        process.wait()
        os.kill(child, 0)  # still there
        with RunLock(tmp_path) as lock:  # it was killed: the lock is free
            content = json.loads(lock.path.read_text())
            assert content == {"pid": os.getpid(), "host": HOST}
        assert lock.path.read_text() == ""


def test_a_child_that_ends_leaves_the_lock_with_its_parent(tmp_path: Path) -> None:
    with holding(tmp_path) as (process, child):
        os.kill(child, signal.SIGKILL)  # a zombie until its parent ends
        assert_refused(tmp_path, f"process {process.pid}")


def test_two_locks_of_one_process_exclude_each_other(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    lock.release()  # harmless
    with RunLock(tmp_path):
        assert_refused(tmp_path, f"process {os.getpid()}")
    lock.acquire()
    lock.release()
    lock.release()
    with RunLock(tmp_path):
        pass
    (tmp_path / "file").write_text("")
    assert_refused(tmp_path / "file", "file/lock")


@pytest.mark.parametrize("content", ["", "{", '{"pid": "x", "host": 1}', "[1]", "\0" * 5000])
def test_a_damaged_lock_file_does_not_stop_a_run(tmp_path: Path, content: str) -> None:
    (tmp_path / "lock").write_text(content)
    with RunLock(tmp_path):
        pass


def test_without_locks_the_owner_in_the_file_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    def write(pid: int, host: str) -> None:
        (tmp_path / "lock").write_text(json.dumps({"pid": pid, "host": host}))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    write(os.getppid(), HOST)
    assert_refused(tmp_path, f"process {os.getppid()} on .* delete lock")
    write(12, f"not-{HOST}")
    assert_refused(tmp_path, "process 12 on not-")
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    write(gone.pid, HOST)
    with RunLock(tmp_path):
        pass
