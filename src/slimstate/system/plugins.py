"""What other packages add: values that they announce as entry points, `[project.entry-points."GROUP"]`.

An entry point leads to a value of the kind that the group is for, or to a tuple of some. What cannot be used is named
in a warning and left out: a package of somebody else never keeps slimstate from working. They are loaded when somebody
first looks, and not when slimstate is imported: they import slimstate themselves.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from slimstate.system.errors import quoted, reason_of

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """Values by name, which are gathered when the first is asked for."""

    def __init__(self, gather: Callable[[], Mapping[str, T]]) -> None:
        self._gather = gather
        self._found: Mapping[str, T] | None = None

    @property
    def _values(self) -> Mapping[str, T]:
        if self._found is None:
            self._found = self._gather()
        return self._found

    def __getitem__(self, name: str) -> T:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def plugged_in(group: str, kind: Any, name: Callable[[Any], str], taken: Collection[str]) -> Iterator[Any]:
    """The values of a group in the order of their entry points; a name that is taken stays with whoever had it."""
    seen = set(taken)
    for point in sorted(entry_points(group=group), key=lambda point: (point.name, point.value)):
        for value in _loaded(point):
            if not isinstance(value, kind):
                _complain(point, f"{quoted(repr(value))} is no {kind.__name__}")
            elif name(value) in seen:
                _complain(point, f"the name {quoted(name(value))} is taken")
            else:
                seen.add(name(value))
                yield value


def _loaded(point: EntryPoint) -> tuple[object, ...]:
    try:
        value = point.load()
    except Exception as error:  # whatever a stranger's module raises
        _complain(point, reason_of(error))
        return ()
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _complain(point: EntryPoint, why: str) -> None:
    package = point.dist.name if point.dist is not None else "a package"
    warnings.warn(f"slimstate leaves out {point.name} of {package} ({point.value}): {why}", stacklevel=2)
