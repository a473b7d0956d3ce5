"""Commands in forks of this process, which has imported everything, so that they start at once."""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a process ended: its exit code (negative: the signal), its standard error, and the time it took."""

    code: int
    errors: str = ""
    seconds: float = 0.0
    processor: float = 0.0  # seconds
    timed_out: bool = False

    @property
    def own_lines(self) -> list[str]:
        return [line for line in self.errors.splitlines() if line.startswith("slimstate: ")]


@dataclass(frozen=True)
class Fork:
    """A process with its standard error in a file."""

    pid: int
    errors: Path
    started: float

    @classmethod
    def start(cls, work: Callable[[], object], errors: Path) -> "Fork":
        """Fork a process that does the work, and ends as `sys.exit` would end it."""
        pid = os.fork()
        if pid == 0:
            os._exit(_run(work, errors))
        return cls(pid, errors, time.monotonic())

    def poll(self, timeout: float, since: float | None = None) -> Ended | None:
        """Return how the process ended, or None while it runs; after `timeout` seconds it is killed.

        Seconds are counted from `since`, or from the start.
        """
        since = self.started if since is None else since
        done, status, used = os.wait4(self.pid, os.WNOHANG)
        late = not done and time.monotonic() - since > timeout
        if late:
            os.killpg(self.pid, signal.SIGKILL)
            done, status, used = os.wait4(self.pid, 0)
        if not done:
            return None
        return Ended(
            code=os.waitstatus_to_exitcode(status), errors=self.errors.read_text(errors="replace"),
            seconds=time.monotonic() - since, processor=used.ru_utime + used.ru_stime, timed_out=late,
        )  # fmt: skip

    def wait(self, timeout: float, since: float | None = None) -> Ended:
        while (ended := self.poll(timeout, since)) is None:
            time.sleep(0.002)
        return ended


def _run(work: Callable[[], object], errors: Path) -> int:
    code: object = 99
    try:
        os.setsid()
        opened = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream, target in ((1, os.open(os.devnull, os.O_WRONLY)), (2, opened)):
            os.dup2(target, stream)
        sys.stdin.close()
        sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115 - a test has replaced them
        sys.stderr = sys.__stderr__ = open(2, "w", closefd=False)  # noqa: SIM115
        code = work() or 0
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return code if isinstance(code, int) else 1
