"""One run per output folder."""

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from qmargin.errors import ConfigError
from qmargin.training.start import RunLock

HOLD = """
import os, sys, time
from qmargin.training.start import RunLock
lock = RunLock(sys.argv[1])
lock.acquire()
child = os.fork() if "fork" in sys.argv else -1
if child == 0:  # said by the child, which has begun then
    print(os.getppid(), os.getpid(), flush=True)
elif child < 0:
    print(os.getpid(), child, flush=True)
time.sleep(120)
"""


def hold(folder: Path, *options: str) -> tuple[subprocess.Popen, int]:
    """A process that holds the lock, and the process that it forked, if asked to."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), *options], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    _, child = process.stdout.readline().split()
    return process, int(child)


def end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_a_second_run_is_refused_and_told_who_runs(tmp_path: Path) -> None:
    process, _ = hold(tmp_path)
    try:
        owner = f"process {process.pid} on {socket.gethostname()}"
        with pytest.raises(ConfigError, match=f"in use by {owner}; choose another"):
            RunLock(tmp_path).acquire()
    finally:
        end(process)
    with RunLock(tmp_path) as lock:  # it was killed: the lock is free, and says whose it was
        content = json.loads(lock.path.read_text())
        assert content == {"pid": os.getpid(), "host": socket.gethostname()}
    assert lock.path.read_text() == ""


def test_two_locks_of_one_process_exclude_each_other(tmp_path: Path) -> None:
    with RunLock(tmp_path), pytest.raises(ConfigError, match=f"process {os.getpid()}"):
        RunLock(tmp_path).acquire()
    with RunLock(tmp_path):
        pass


def test_children_do_not_inherit_the_lock(tmp_path: Path) -> None:
    """Data workers may live on for seconds after a kill -9; the next run must not wait for them."""
    process, child = hold(tmp_path, "fork")
    try:
        with pytest.raises(ConfigError):
            RunLock(tmp_path).acquire()
        end(process)
        os.kill(child, 0)  # still there
        with RunLock(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_child_that_ends_leaves_the_lock_with_its_parent(tmp_path: Path) -> None:
    process, child = hold(tmp_path, "fork")
    try:
        os.kill(child, signal.SIGKILL)
        with pytest.raises(ConfigError):
            RunLock(tmp_path).acquire()
    finally:
        end(process)


@pytest.mark.parametrize("content", ["", "{", '{"pid": "x", "host": 1}', "[1]", "\0" * 5000])
def test_a_damaged_lock_file_does_not_stop_a_run(tmp_path: Path, content: str) -> None:
    (tmp_path / "lock").write_text(content)
    with RunLock(tmp_path):
        pass


def no_locks(*_: object) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


def test_without_locks_the_owner_in_the_file_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", no_locks)
    path = tmp_path / "lock"
    host = socket.gethostname()
    path.write_text(json.dumps({"pid": os.getppid(), "host": host}))
    with pytest.raises(ConfigError, match=f"process {os.getppid()} on .* delete lock"):
        RunLock(tmp_path).acquire()
    path.write_text(json.dumps({"pid": 12, "host": f"not-{host}"}))
    with pytest.raises(ConfigError, match="process 12 on not-"):
        RunLock(tmp_path).acquire()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    path.write_text(json.dumps({"pid": gone.pid, "host": host}))
    with RunLock(tmp_path):
        pass


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be opened"):
        RunLock(tmp_path / "file").acquire()


def test_releasing_twice_is_harmless(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    lock.release()
    lock.acquire()
    lock.release()
    lock.release()
    with RunLock(tmp_path):
        pass
