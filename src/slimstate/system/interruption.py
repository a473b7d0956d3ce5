"""Stop on Ctrl-C or another signal: print what is kept, remove what is unfinished, and end the process.

A signal handler in Python runs only when the main thread is back in Python code, which can take as long as an import
or an operation of torch. So a thread waits for signals and ends the process itself. Code that writes files registers
here what a stop must remove. Signals are sent to a whole process: there is one `STOP`, and only the command listens.
"""

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from threading import Lock, Thread, current_thread, main_thread
from types import FrameType
from typing import TypeVar

T = TypeVar("T")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
MAX_WAIT = 1.0  # seconds that an output may take to move to its place
CLEAR_LINE = "\r\x1b[2K\x1b[?25h"  # erases a progress bar and shows the cursor that it had hidden


class Interruption:
    """What to print and what to remove when the process is stopped."""

    def __init__(self) -> None:
        self.lock = Lock()  # held while an output moves to its place; a process that is ending never releases it
        self.translate: Callable[[str], str] = str  # turns names of parameters into flags of the command
        self.shows_message: Callable[[], bool] = lambda: True
        self._unfinished: list[tuple[Path, Callable[[], bool]]] = []
        self._new_folders: list[Path] = []
        self._outputs: list[Path] = []
        self._messages: list[Callable[[], str | None]] = []
        self._restore: Callable[[], None] | None = None  # set while listening
        self._follows_forks = False

    def removing(self, path: Path, unless: Callable[[], bool] = lambda: False) -> AbstractContextManager[None]:
        """Remove `path` if the process is stopped now, `unless` that returns True then."""
        return _listed(self._unfinished, (path, unless))

    def removing_if_empty(self, folder: Path) -> AbstractContextManager[None]:
        """Remove a folder if the process is stopped now and the folder is empty then."""
        return _listed(self._new_folders, folder)

    def with_message(self, message: Callable[[], str | None]) -> AbstractContextManager[None]:
        """Print this message if the process is stopped now; of several, the outermost that is not None is printed."""
        return _listed(self._messages, message)

    def add_output(self, path: Path) -> None:
        """Note that an output is complete and in its place."""
        if path not in self._outputs:
            self._outputs.append(path)

    def listen(self) -> bool:
        """Handle signals that are not ignored; return False if that was so already, or in another thread."""
        if self._restore is not None or current_thread() is not main_thread():
            return False
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        handlers = {number: signal.getsignal(number) for number in SIGNALS}
        for number, handler in handlers.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, _do_nothing)
        wakeup_fd = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)

        def restore() -> None:
            signal.set_wakeup_fd(wakeup_fd)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            os.close(write_end)

        self._restore = restore
        if not self._follows_forks:
            self._follows_forks = True
            os.register_at_fork(before=self._block, after_in_parent=self._unblock, after_in_child=self._leave_to_parent)
        Thread(target=self._wait, args=(read_end,), daemon=True, name="signals").start()
        return True

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle signals while the command works; a process that is ending never leaves this."""
        began_here = self.listen()
        self._outputs.clear()
        try:
            yield
        finally:
            with self.lock:
                if began_here and self._restore is not None:
                    self._restore()
                    self._restore = None

    def _wait(self, read_end: int) -> None:
        """Read the numbers of signals, which Python writes to the other end of the pipe."""
        while numbers := os.read(read_end, 16):
            for number in numbers:
                if number in SIGNALS:
                    self._end(number)
        os.close(read_end)

    def _end(self, number: int) -> None:
        code = 128 + number
        if not self.lock.acquire(timeout=MAX_WAIT):
            os._exit(code)
        message, stderr = self._message(), os.dup(2)
        devnull = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):  # other threads still run, and what they print now would confuse
            os.dup2(devnull, stream)
        if self.shows_message():
            start = CLEAR_LINE if os.isatty(stderr) else ""
            with suppress(OSError):
                os.write(stderr, f"{start}slimstate: stopped; {message}\n".encode("utf-8", "backslashreplace"))
        _kill_children()
        self._remove_unfinished()
        os._exit(code)

    def _message(self) -> str:
        for message in self._messages:
            with suppress(Exception):  # a folder that changes while it is read
                if (text := message()) is not None:
                    return " ".join(self.translate(text).split())
        unfinished = [path for path, unless in self._unfinished if not unless()]
        outputs = (path for path in self._outputs if path.exists())
        complete = [path for path in outputs if not any(path.is_relative_to(folder) for folder in unfinished)]
        if not complete:
            return "nothing was written; the same command starts again"
        more = f" and {len(complete) - 1} more" if len(complete) > 1 else ""
        return f"{complete[-1]}{more}: written, and complete"

    def _remove_unfinished(self) -> None:
        for path, unless in reversed(self._unfinished):
            for _ in range(0 if unless() else 50):  # other threads may still write there
                shutil.rmtree(path, ignore_errors=True)
                if not path.exists():
                    break
                time.sleep(0.01)
        for folder in reversed(self._new_folders):
            with suppress(OSError):
                folder.rmdir()

    def _block(self) -> None:
        """Hold signals back during a fork: one to the child would reach our pipe before the child has left it."""
        if self._restore is not None:
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

    def _unblock(self) -> None:
        if self._restore is not None:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def _leave_to_parent(self) -> None:
        """Give a forked process the default handlers, and leave everything registered here to its parent."""
        for entries in (self._unfinished, self._new_folders, self._messages, self._outputs):
            entries.clear()  # type: ignore[attr-defined]
        if self._restore is not None:
            self._restore, self.lock = None, Lock()
            signal.set_wakeup_fd(-1)
            for number in SIGNALS:
                if signal.getsignal(number) is _do_nothing:
                    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


@contextmanager
def _listed(entries: list[T], entry: T) -> Iterator[None]:
    entries.append(entry)
    try:
        yield
    finally:
        entries.remove(entry)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Let the main thread go on until the thread that waits for signals ends the process."""


def _kill_children() -> None:
    """Kill the processes that a library started for this one."""
    for name in ("multiprocessing", "multiprocess"):
        module = sys.modules.get(name)
        if module is not None:
            with suppress(Exception):
                for child in module.active_children():
                    child.kill()


STOP = Interruption()
