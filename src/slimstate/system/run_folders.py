"""Unfinished work in a folder beside the one it will become, so that it can be continued after an interruption."""

import fcntl
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeVar

from slimstate.system import atomic, distributed
from slimstate.system.atomic import check_place, create_folder, remove_if_empty, writing
from slimstate.system.errors import ModelError, OutputError, PlanError
from slimstate.system.interruption import STOP
from slimstate.system.json_files import JsonObject, difference, read_json, write_json
from slimstate.system.progress import Reporter

SETTINGS = "settings.json"
T = TypeVar("T")
F = TypeVar("F", bound="RunFolder")


def path_beside(out: Path, suffix: str) -> Path:
    """Return the path of an output with a suffix; that of "." has the name of the folder."""
    out = out if out.name else out.absolute()
    return out.with_name(out.name + suffix)


@dataclass(frozen=True)
class RunFolder:
    """A folder of unfinished work, used by one process at a time and removed when the work is done.

    A subclass names the work, which is also the ending of the folder's name (`OUT.training`), the settings by which
    its folders are recognised, and says when there is progress worth keeping.
    """

    WORK: ClassVar[str]
    REQUIRED_SETTINGS: ClassVar[frozenset[str]]

    path: Path

    @classmethod
    def beside(cls: type[F], out: Path) -> F:
        """Return the run folder of the work that will become `out`."""
        return cls(path_beside(out, f".{cls.WORK}"))

    def has_progress(self) -> bool:
        """Return whether a later run could continue from here."""
        raise NotImplementedError

    def survives_a_stop(self) -> bool:
        """Return whether the folder stays after an error or a signal."""
        return self.has_progress()

    def describe(self) -> str | None:
        """Return what is kept here and how to continue, for the message of a stop."""
        return None

    @contextmanager
    def open(
        self, settings: Mapping[str, object], reporter: Reporter, *,
        force: bool, resume: bool | None = None, prepare: Callable[[], T],
    ) -> Iterator[T]:  # fmt: skip
        """Continue the earlier run with the same settings or start a new one; yield what `prepare` returns.

        The main process locks the folder and calls `prepare`. A new folder is emptied again if that fails. `resume`
        None continues an earlier run by itself; False refuses to, and True insists on its settings.
        """
        with ExitStack() as stack:

            def start() -> T:
                stack.enter_context(locked_folder(self.path))
                stack.callback(remove_if_empty, self.path)
                if self._continues(settings, reporter, force, resume):
                    return prepare()
                self.empty()
                with self._emptied_on_error(unless=lambda: False):
                    write_json(self.path / SETTINGS, settings)
                    return prepare()

            value = distributed.from_main(start)
            with self._emptied_on_error(unless=self.survives_a_stop), STOP.with_message(self.describe):
                try:
                    yield value
                except OutputError as error:
                    if not self.has_progress():
                        if distributed.is_main():
                            self.empty()
                    elif (hint := self.describe()) is not None:
                        raise OutputError(f"{error}; {hint}") from error
                    raise
            distributed.from_main(self.empty)

    def empty(self) -> None:
        """Empty the folder, which stays locked; the settings go last, by which the rest can still be recognised."""
        for path in sorted(self.path.iterdir(), key=lambda path: (path.name == SETTINGS, path.is_file())):
            atomic.remove(path)

    def _continues(self, settings: Mapping[str, object], reporter: Reporter, force: bool, resume: bool | None) -> bool:
        """Return whether to continue an earlier run; raise where the folder may not be used."""
        earlier = self._earlier_settings()
        if earlier is None or (force and resume is False):
            if resume:
                reporter.say(f"nothing to resume in {self.path}: starting")
            return False
        if resume is False:
            raise OutputError(f"{self.path} holds unfinished {self.WORK}: `resume` continues it, `force` starts over")
        other = difference(earlier, settings)
        if other is None:
            reporter.say(f"continuing {self.path}")
        elif resume or not force:
            way_out = "" if resume else "; `force` starts over"
            raise PlanError(f"{self.path} was started with other settings: {other}{way_out}")
        return other is None

    def _earlier_settings(self) -> JsonObject | None:
        """Return the settings of an earlier run, or None if there was none; refuse a folder of something else."""
        path = self.path / SETTINGS
        try:
            settings = read_json(path) if path.is_file() else {}
        except ModelError:
            settings = {}
        if settings.keys() >= self.REQUIRED_SETTINGS:
            return settings
        if not all(atomic.STAGING.fullmatch(path.name) for path in self.path.iterdir()):
            raise OutputError(f"{self.path} cannot be used: it has no {SETTINGS} of unfinished {self.WORK}; remove it")
        return None

    @contextmanager
    def _emptied_on_error(self, unless: Callable[[], bool]) -> Iterator[None]:
        """Leave an empty folder after an error, and none after a signal, `unless` there is a reason to keep it."""
        if not distributed.is_main():
            yield
            return
        with STOP.removing(self.path, unless=unless):
            try:
                yield
            except BaseException:
                if not unless():
                    self.empty()
                raise


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Create a folder, lock it for this process, and clear what killed processes left in it."""
    check_place(folder, folder=True)
    with ExitStack() as stack:
        with writing(folder):
            stack.enter_context(create_folder(folder.absolute()))
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, descriptor)
            _lock(folder, descriptor)
            atomic.remove_leftovers(folder)
        yield


def _lock(folder: Path, descriptor: int) -> None:
    """Lock the folder itself: no lock file can be left in it, and the system unlocks it when the process ends."""
    in_use = OutputError(f"another process works in {folder}: wait until it ends, or choose another folder")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise in_use from error
    except OSError:
        pass  # a file system without locks
    if not (folder.exists() and os.path.samestat(os.fstat(descriptor), folder.stat())):
        raise in_use  # by a process that has just removed the folder
