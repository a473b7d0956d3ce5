"""Progress reporting: messages, progress bars and tables of work that takes a while."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Update: TypeAlias = Callable[[int, str], None]  # called with the number of steps done and a note
LOGGER = logging.getLogger("slimstate")


class Reporter:
    """Report progress. This class sends messages to the logger "slimstate"; override what you want to show.

    Examples:
        >>> class Printer(slimstate.Reporter):
        ...     def say(self, line):
        ...         print(line)
        >>> slimstate.prune("model", "slim", method="l1", progress=Printer())
    """

    def say(self, line: str) -> None:
        """Show one line."""
        LOGGER.info(line)

    def detail(self, line: str) -> None:
        """Show one line of diagnostics."""
        LOGGER.debug(line)

    def track(self, items: Iterable[T], label: str, total: int | None = None, tokens: float = 0) -> Iterator[T]:
        """Yield the items and show how many are done; `tokens` as for `meter`."""
        with self.meter(label, total, tokens=tokens) as update:
            update(0, "")
            for done, item in enumerate(items, start=1):
                yield item
                update(done, "")

    def waiting(self, label: str) -> AbstractContextManager[object]:
        """Show that work without countable steps is going on."""
        return nullcontext()

    def meter(self, label: str, total: int | None, later: int = 0, tokens: float = 0) -> AbstractContextManager[Update]:
        """Show work that counts its own steps; the first update says where it starts.

        `later` is how many steps like these follow under other labels: the time left includes them. `tokens` is the
        cost of a step: as many tokens, once forward through the model.
        """
        return nullcontext(lambda done, note: None)

    def then(self, work: str, tokens: float = 0) -> AbstractContextManager[object]:
        """Say, while this is open, that other work follows.

        The time left includes it where its cost in tokens is known and some were timed before; otherwise it is named.
        """
        return nullcontext()

    @contextmanager
    def table(self, columns: Sequence[str]) -> Iterator[Callable[[Sequence[str]], None]]:
        """Show a table that grows; call the result with the cells of each new row."""
        self.say("  ".join(columns))
        yield lambda cells: self.say("  ".join(cells))


@dataclass
class Pace:
    """Estimate the remaining time from all steps of this run, which is steady also where a step takes minutes.

    The time left of work within other work is that of the other work, `outer`. `follows` has the work that follows,
    with its cost in tokens; `earlier` are the seconds per token of work before.
    """

    label: str
    total: int | None
    later: int = 0
    tokens: float = 0
    outer: "Pace | None" = None
    follows: Sequence[tuple[str, float]] = ()
    earlier: float = 0
    clock: Callable[[], float] = time.monotonic
    start: tuple[int, float] | None = field(default=None, init=False)
    done: int = field(default=0, init=False)  # at the last update
    updated: float = field(default=0.0, init=False)  # the time of the last update

    def update(self, done: int) -> None:
        self.done, self.updated = done, self.clock()
        if self.start is None:
            self.start = done, self.updated

    def left(self) -> str:
        """Return the remaining time, or an empty string where it is not known or nothing remains."""
        if self.outer is not None:
            return self.outer.left()
        if not self.total or not self.seconds_per_step or self.done >= self.total + self.later:
            return ""
        per_token = self.seconds_per_token
        seconds = self.seconds_per_step * (self.total + self.later - self.done)
        seconds += per_token * sum(tokens for _, tokens in self.follows) - self.clock() + self.updated
        unknown = [work for work, tokens in self.follows if not per_token * tokens]
        return ", then ".join([f"{timedelta(seconds=max(0, round(seconds)))} left", *unknown])

    @property
    def seconds_per_step(self) -> float:
        """The mean time of the steps so far, 0 where none was timed."""
        first, started = self.start or (self.done, 0.0)
        return (self.updated - started) / (self.done - first) if self.done > first else 0.0

    @property
    def seconds_per_token(self) -> float:
        """The time that a token takes once forward through the model, 0 where it is not known."""
        return (self.seconds_per_step / self.tokens if self.tokens else 0.0) or self.earlier

    def line(self, note: str) -> str:
        """Return the progress as one line, such as `calibrating 3/8  0:00:20 left`."""
        count = f"{self.done}" if self.total is None else f"{self.done}/{self.total}"
        return "  ".join(part for part in (f"{self.label} {count}", note, self.left()) if part)


class TimedReporter(Reporter):
    """Estimate the time left of a whole command; `shown` shows the pace of one part of it."""

    def __init__(self) -> None:
        self.outer: Pace | None = None  # of the meter that is open
        self.follows: tuple[tuple[str, float], ...] = ()
        self.seconds_per_token = 0.0

    def shown(self, pace: Pace) -> AbstractContextManager[Update]:
        """Show a pace while this is open, and return the function that updates it."""
        raise NotImplementedError

    @contextmanager
    def meter(self, label: str, total: int | None, later: int = 0, tokens: float = 0) -> Iterator[Update]:
        outer = self.outer
        pace = Pace(label, total, later, tokens, outer, self.follows, self.seconds_per_token)
        self.outer = outer or pace
        try:
            with self.shown(pace) as update:
                yield update
        finally:
            self.outer, self.seconds_per_token = outer, pace.seconds_per_token

    @contextmanager
    def then(self, work: str, tokens: float = 0) -> Iterator[None]:
        before = self.follows
        self.follows = ((work, tokens), *before)
        try:
            yield
        finally:
            self.follows = before


SILENT = Reporter()
