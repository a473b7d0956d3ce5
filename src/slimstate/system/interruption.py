"""A stop from outside, by Ctrl-C or another signal: what is unfinished goes, what is kept is said, the process ends.

A handler in Python runs only once the main thread is back in Python, which takes as long as an import or an operation
of torch. So a thread of its own waits for signals and ends the process itself; whoever writes says here what would be
left behind. Signals come to a process as a whole: there is one `STOP`, and only the command listens.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock, Thread, current_thread, main_thread
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PATIENCE = 1.0  # seconds that an output may take to move to its place
SHOW_CURSOR = "\r\x1b[2K\x1b[?25h"  # over a progress bar, which had hidden it


class Interruption:
    """What there is to know when a process is stopped.

    The lock is held while an output moves to its place, and for ever once the process is ending: nothing appears then.
    """

    def __init__(self) -> None:
        self.lock = Lock()
        self.translate: Callable[[str], str] = str  # from the words of the library into those of the command
        self.speaks: Callable[[], bool] = lambda: True
        self._unfinished: list[tuple[Path, Callable[[], bool]]] = []
        self._made: list[Path] = []
        self._written: list[Path] = []
        self._keepers: list[Callable[[], str | None]] = []
        self._restore: Callable[[], None] | None = None
        # a signal to a child that comes before it has left ours would be taken for one to us
        os.register_at_fork(before=_hold_back, after_in_parent=_let_through, after_in_child=self._leave_to_parent)

    @contextmanager
    def unfinished(self, path: Path, unless: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Of no use to anybody if the process ends now, `unless` this says otherwise then."""
        entry = (path, unless)
        self._unfinished.append(entry)
        try:
            yield
        finally:
            self._unfinished.remove(entry)

    @contextmanager
    def made_for_it(self, folder: Path) -> Iterator[None]:
        """A folder that goes too, where nothing is in it."""
        self._made.append(folder)
        try:
            yield
        finally:
            self._made.remove(folder)

    @contextmanager
    def keeping(self, say: Callable[[], str | None]) -> Iterator[None]:
        """`say` tells what is kept and how to go on, or None. The outermost that has something to say is asked."""
        self._keepers.append(say)
        try:
            yield
        finally:
            self._keepers.remove(say)

    def written(self, path: Path) -> None:
        """An output is in its place."""
        if path not in self._written:
            self._written.append(path)

    def listen(self) -> bool:
        """From now on a signal ends the process as it should; False where that was so, or is not for this thread.

        Signals that are ignored stay ignored.
        """
        if self._restore is not None or current_thread() is not main_thread():
            return False
        heard, told = os.pipe()
        os.set_blocking(told, False)
        previous = {number: signal.getsignal(number) for number in SIGNALS}
        for number, handler in previous.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, _left_to_the_thread)
        fallback = signal.set_wakeup_fd(told, warn_on_full_buffer=False)

        def restore() -> None:
            signal.set_wakeup_fd(fallback)
            for number, handler in previous.items():
                signal.signal(number, handler)
            os.close(told)

        self._restore = restore
        Thread(target=self._wait, args=(heard,), daemon=True, name="signals").start()
        return True

    @contextmanager
    def listening(self) -> Iterator[None]:
        """While the command works. Where the process is ending already, this is never left."""
        began_here = self.listen()
        self._written.clear()
        try:
            yield
        finally:
            with self.lock:
                if began_here and self._restore is not None:
                    self._restore()
                    self._restore = None

    def _wait(self, heard: int) -> None:
        while numbers := os.read(heard, 16):
            for number in numbers:
                if number in SIGNALS:
                    self._end(number)
        os.close(heard)

    def _end(self, number: int) -> None:
        code = 128 + number
        if not self.lock.acquire(timeout=PATIENCE):
            os._exit(code)
        line, out = self._line(), os.dup(2)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):  # what the other threads think of it is of no interest
            os.dup2(nowhere, stream)
        if self.speaks():
            start = SHOW_CURSOR if os.isatty(out) else ""
            with suppress(OSError):
                os.write(out, f"{start}slimstate: stopped; {line}\n".encode("utf-8", "backslashreplace"))
        _end_children()
        self._remove()
        os._exit(code)

    def _line(self) -> str:
        for say in self._keepers:
            with suppress(Exception):  # a folder that is being changed while it is looked at
                if (kept := say()) is not None:
                    return " ".join(self.translate(kept).split())
        going = tuple(path for path, unless in self._unfinished if not unless())
        there = [str(path) for path in self._written if path.exists() and not _lies_in(path, going)]
        if not there:
            return "nothing was written; the same command starts again"
        return f"{there[-1]}{f' and {len(there) - 1} more' if len(there) > 1 else ''}: written, and whole"

    def _remove(self) -> None:
        """Others may still write there: until it is gone."""
        for path, unless in reversed(self._unfinished):
            for _ in range(0 if unless() else 50):
                shutil.rmtree(path, ignore_errors=True)
                if not path.exists():
                    break
                time.sleep(0.01)
        for folder in reversed(self._made):
            with suppress(OSError):
                folder.rmdir()

    def _leave_to_parent(self) -> None:
        """A process that was forked is stopped as any other; what the parent writes is no business of its."""
        if self._restore is not None:
            self._restore, self.lock = None, Lock()
            signal.set_wakeup_fd(-1)
            for number in SIGNALS:
                if signal.getsignal(number) is _left_to_the_thread:
                    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        for entries in (self._unfinished, self._made, self._keepers, self._written):
            entries.clear()  # type: ignore[attr-defined]
        _let_through()


def _hold_back() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _let_through() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _lies_in(path: Path, folders: tuple[Path, ...]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


def _left_to_the_thread(number: int, frame: FrameType | None) -> None:
    """The main thread goes on until the process ends."""


def _end_children() -> None:
    """Processes of this one's own, by whichever library they were started."""
    for name in ("multiprocessing", "multiprocess"):
        module = sys.modules.get(name)
        if module is not None:
            with suppress(Exception):
                for child in module.active_children():
                    child.kill()


STOP = Interruption()
