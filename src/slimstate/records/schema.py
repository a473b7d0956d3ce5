"""Dataclasses as JSON and back. The annotations of a record's fields are its schema, and there is no other.

`read` makes a value of an annotated type from JSON, or says in words where it does not fit; `written` is the way back.
A field without a default must be there; one whose metadata say `json: None` is in memory alone. Fields that a type does
not know are passed over, so that files of other versions are read.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, is_dataclass
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from slimstate.system.errors import SlimstateError, quoted
from slimstate.system.json_files import JsonObject, is_unicode, plain

T = TypeVar("T")
LIMIT = 1e300  # beyond it arithmetic overflows; also what tells NaN and infinities


class Misfit(Exception):  # noqa: N818 - it becomes a line about a file, and is no error of the program
    """Where JSON is not of a type, in words."""


@dataclass(frozen=True)
class Check:
    """What a value must be besides its type, and how that is said."""

    words: str
    holds: Callable[[Any], bool]


Positive = Annotated[float, Check("a positive number", lambda value: value > 0)]
Count = Annotated[int, Check("a count", lambda value: value >= 0)]
Whole = Annotated[int, Check("a whole number above zero", lambda value: value > 0)]
FILLED = Check("a list with something in it", bool)
NAMED = Check("an object with something in it", bool)


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -LIMIT < value < LIMIT


def is_text(value: object) -> bool:
    return isinstance(value, str) and is_unicode(value)


SIMPLE: dict[object, Check] = {
    float: Check("a number", is_number),
    int: Check("a whole number", lambda value: isinstance(value, int) and is_number(value)),
    str: Check("text", is_text),
    bool: Check("true or false", lambda value: isinstance(value, bool)),
}


def read(kind: type[T], value: object, place: str = "") -> T:
    """The value as its type has it; a `Misfit` names the first place, within `place`, where it does not fit."""
    found: T = _read(kind, value, place)
    return found


def check(kind: Any, value: Mapping[str, object], but: Collection[str] = ()) -> None:
    """A `Misfit` where the fields of a dataclass, but for some, are not what their annotations say."""
    for name, written_as, annotation, required in _fields(kind):
        if name not in but and (required or value.get(written_as) is not None):
            _read(annotation, value.get(written_as), written_as)


def _read(kind: Any, value: Any, place: str) -> Any:
    origin, parts = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin is Annotated:
        bare, rule = parts[:2]
        if value is not None and bare in SIMPLE and not SIMPLE[bare].holds(value):
            raise Misfit(f"{_at(place)} is not {rule.words}")
        return _checked(rule, _read(bare, value, place), place)
    if origin in (typing.Union, types.UnionType):
        inner = tuple(part for part in parts if part is not type(None))
        empty = value is None or (value == {} and is_dataclass(inner[0]))  # an object without fields says nothing
        if empty and len(inner) < len(parts):
            return None
        return _first_that_fits(inner, value, place)
    if value is None:
        raise Misfit(f"{_at(place)} is missing")
    if kind in SIMPLE:
        return _checked(SIMPLE[kind], value, place)
    if origin is Literal:
        return _checked(Check(f"one of {', '.join(map(str, parts))}", parts.__contains__), value, place)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise Misfit(f"{_at(place)} is not {FILLED.words}")
        return tuple(_read(parts[0], item, f"{place}[{number}]") for number, item in enumerate(value))
    if not isinstance(value, Mapping):
        raise Misfit(f"{_at(place)} is not {NAMED.words}")
    if is_dataclass(kind):
        return _read_fields(kind, value, place)
    return {str(name): _read(parts[1], item, f"{place}.{name}") for name, item in value.items()}


def _at(place: str) -> str:
    """A place in a file, whose names may be of any length."""
    return quoted(place) or "it"


def _first_that_fits(kinds: tuple[Any, ...], value: Any, place: str) -> Any:
    for kind in kinds[:-1]:
        with suppress(Misfit):
            return _read(kind, value, place)
    return _read(kinds[-1], value, place)


def _checked(check: Check, value: Any, place: str) -> Any:
    if not check.holds(value):
        raise Misfit(f"{_at(place)} is not {check.words}")
    return value


def _read_fields(kind: Any, value: Mapping[str, Any], place: str) -> Any:
    found: JsonObject = {}
    for name, written_as, annotation, required in _fields(kind):
        inside = f"{place}.{written_as}".lstrip(".")
        if value.get(written_as) is not None:
            found[name] = _read(annotation, value[written_as], inside)
        elif required:
            found[name] = _read(annotation, None, inside)
    try:
        return kind(**found)
    except (ValueError, SlimstateError) as error:  # a value that checks itself
        raise Misfit(f"{_at(place)} cannot be: {error}") from error


@functools.cache
def _fields(kind: Any) -> tuple[tuple[str, str, Any, bool], ...]:
    """Name, name in JSON, annotation, and whether it must be there, of every field of a dataclass."""
    annotations = typing.get_type_hints(kind, include_extras=True)
    return tuple(
        (
            item.name,
            str(item.metadata.get("json", item.name)),
            annotations[item.name],
            item.default is MISSING and item.default_factory is MISSING,
        )
        for item in dataclasses.fields(kind)
        if item.metadata.get("json", item.name) is not None
    )


def written(value: Any) -> Any:
    """A dataclass, and all that is in it, as strict JSON has it."""
    if is_dataclass(value) and not isinstance(value, type):
        fields = _fields(type(value))
        return {written_as: written(getattr(value, name)) for name, written_as, _, _ in fields}
    if isinstance(value, Mapping):
        return {str(key): written(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [written(item) for item in value]
    return plain(value)
