"""Collect the values that modules list: those of a package of slimstate, and those of other packages.

A module of a package of slimstate lists its values as a tuple, `FAMILIES = (...)`. Another package announces its own
as entry points, `[project.entry-points."slimstate.families"]`, each a value or a tuple of values. An entry point that
cannot be used is left out with a warning, so that somebody else's package never keeps slimstate from working. Entry
points are loaded on first access and not when slimstate is imported, because they import slimstate themselves.
"""

import importlib
import pkgutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any, Generic, TypeVar

from slimstate.system.errors import quoted, reason_of

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """Values of one kind by name: those that the modules of a package list, and those of entry points."""

    def __init__(
        self, kind: type[T], package: ModuleType, attribute: str, *, name: Callable[[T], str], order: Callable[[T], Any]
    ) -> None:
        self.kind, self.attribute, self.name, self.order = kind, attribute, name, order
        self.group = package.__name__
        self.own = self.index(listed_values(package, attribute, kind))

    def index(self, values: Iterable[T]) -> dict[str, T]:
        """Return the values by name in their order; no two may have the same name."""
        indexed: dict[str, T] = {}
        for value in sorted(values, key=self.order):
            if self.name(value) in indexed:
                raise TypeError(f"two values of {self.attribute} are called {self.name(value)}")
            indexed[self.name(value)] = value
        return indexed

    @cached_property
    def _values(self) -> dict[str, T]:
        values = dict(self.own)
        for point in sorted(entry_points(group=self.group), key=lambda point: (point.name, point.value)):
            for value in _load(point):
                if not isinstance(value, self.kind):
                    _warn(point, f"{quoted(repr(value))} is not a {self.kind.__name__}")
                elif self.name(value) in values:
                    _warn(point, f"the name {quoted(self.name(value))} is taken")
                else:
                    values[self.name(value)] = value
        return self.index(values.values())

    def __getitem__(self, name: str) -> T:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def listed_values(package: ModuleType, attribute: str, kind: type[T]) -> Iterator[T]:
    """Yield the values of one kind that the modules of a package list; other modules are parts that these share."""
    for name in sorted(module.name for module in pkgutil.iter_modules(package.__path__)):
        if name.endswith("_triton"):  # which may not be installed
            continue
        module = importlib.import_module(f"{package.__name__}.{name}")
        values = getattr(module, attribute, None)
        if values is None and any(isinstance(value, kind) for value in vars(module).values()):
            raise TypeError(f"{module.__name__} has a {kind.__name__} but does not list it: {attribute} = (...,)")
        if not isinstance(values, tuple | None):
            raise TypeError(f"{module.__name__}: {attribute} must be a tuple, got {values!r}")
        for value in values or ():
            if not isinstance(value, kind):
                raise TypeError(f"{module.__name__} lists {value!r} in {attribute}, which is not a {kind.__name__}")
            yield value


def _load(point: EntryPoint) -> tuple[object, ...]:
    try:
        value = point.load()
    except Exception as error:  # whatever somebody else's module raises
        _warn(point, reason_of(error))
        return ()
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _warn(point: EntryPoint, reason: str) -> None:
    package = point.dist.name if point.dist is not None else "a package"
    warnings.warn(f"slimstate leaves out {point.name} of {package} ({point.value}): {reason}", stacklevel=2)
