"""Options that are declared once: the fields of a class.

    class PruneConfig(Options):
        key_dim: Annotated[int | None, Meta(ge=1)] = None
        \"\"\"Channels to keep in every head.\"\"\"
        calibration: Calibration = Calibration()
        reconstruct: ReconstructOptions | None = None
        \"\"\"Train each cut layer to match the output of the uncut layer.\"\"\"

A field is an option: its annotation is the type, its default the default, the string below it the help. A field whose
type is another `Options` is a group: its options stand beside those of the config. An optional group is a switch,
`reconstruct`, and its options carry its name, `reconstruct_steps`. By these flat names options are flags of the
command, keys of TOML and JSON files, keyword arguments in Python, and the provenance of a result.
"""

import ast
import functools
import inspect
import math
import operator
import re
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, field, fields
from difflib import get_close_matches
from itertools import pairwise
from numbers import Integral
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from slimstate.system.errors import PlanError, SlimstateError, quoted
from slimstate.system.value import Value

C = TypeVar("C", bound="Options")
TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
MAX_INTEGER = 2**53  # larger numbers overflow in the libraries below, and no option means them
LIMITS = {
    "ge": ("at least", operator.ge),
    "gt": ("more than", operator.gt),
    "le": ("at most", operator.le),
    "lt": ("less than", operator.lt),
}


def once(default: Any = False) -> Any:
    """Declare an option of a single run, such as `force`, which is not part of the provenance."""
    return field(default=default, metadata={"once": True})


class Options(Value):
    """Base of every config and option group; checks and converts the values of its fields."""

    def __post_init__(self) -> None:
        for option in options_of(type(self)):
            if len(option.path) == 1 and option.group is None:
                object.__setattr__(self, option.name, option.convert(getattr(self, option.name)))
        self.check()

    def check(self) -> None:
        """Raise a `PlanError` where values contradict each other; overridden by configs."""

    @classmethod
    def from_values(cls: type[C], values: Mapping[str, object], base: C | None = None) -> C:
        """Return the config with these values by flat name, or groups by field, and `base` or defaults for the rest."""
        names = [option.name for option in options_of(cls)]
        groups = [item.name for item in fields(cls) if isinstance(values.get(item.name), Options)]
        for name in values:
            if name not in names and name not in groups:
                close = get_close_matches(name, names, n=1)
                hint = f"; did you mean `{close[0]}`?" if close else f"; there are {', '.join(names)}"
                raise PlanError(f"unknown option {quoted(name)}{hint}")
        return _build(cls, values, "", base)

    @classmethod
    def merge(cls: type[C], config: C | None, values: Mapping[str, object]) -> C:
        """Return the config of a call that has one, options by name, or both; the options override the config."""
        if config is not None and not isinstance(config, cls):
            raise PlanError(f"the config must be a {cls.__name__}, got {type(config).__name__}")
        return config if config is not None and not values else cls.from_values(values, config)

    def to_values(self) -> dict[str, object]:
        """Return the options that differ from their defaults as plain data by flat name, without those of one run."""
        values = ((option, option.value_in(self)) for option in options_of(type(self)))
        return {each.name: plain_value(value) for each, value in values if not each.once and value != each.default}

    def refuse(self, names: Iterable[str], reason: str, *, unless: bool = False) -> None:
        """Raise a `PlanError` if one of these options differs from its default, unless it has an effect."""
        for name in () if unless else filter(self.to_values().__contains__, names):
            raise PlanError(f"`{name}` {reason}")


class Option(Value):
    """One option of a config: `path` leads to its field, `group` is what a switch turns on, `section` its title."""

    name: str
    path: tuple[str, ...]
    annotation: Any
    default: Any
    help: str
    section: str = "Options"
    once: bool = False
    group: type[Options] | None = None

    @property
    def type(self) -> Any:
        """The type without `None` and limits."""
        return _bare(self.annotation)

    def value_in(self, config: Options) -> Any:
        """Return the value that a config has; the default where its group is off."""
        value: Any = config
        for name in self.path:
            if value is None:
                return self.default
            value = getattr(value, name)
        return value is not None if self.group is not None else value

    def convert(self, value: Any) -> Any:
        """Return the value as its type, or raise a `PlanError` that says what it must be."""
        if value is None and (self.default is None or _optional(self.annotation)):
            return None
        if isinstance(value, str) and value == "" and get_origin(self.type) is not tuple:
            raise PlanError(f"`{self.name}` must not be empty")
        return self._check(self.annotation, value)

    def _check(self, annotation: Any, value: Any) -> Any:
        """Return the value as its type, within the limits and after the functions of the annotation."""
        converted = self._convert(_bare(annotation), value)
        metadata = getattr(annotation, "__metadata__", ())  # functions, and limits as a `Meta`
        for function in filter(callable, metadata):
            converted = function(converted)
        for limits in metadata:
            for name, (words, holds) in LIMITS.items():
                bound = getattr(limits, name, None)
                if bound is not None and not holds(converted, bound):
                    raise PlanError(f"`{self.name}` must be {words} {bound:g}, got {converted:g}")
        return converted

    def _convert(self, kind: Any, value: Any) -> Any:
        if kind is Any:
            return value
        if get_origin(kind) is tuple:
            items = value.split(",") if isinstance(value, str) else value
            if not isinstance(items, (list, tuple)):
                raise self._error("a list", value)
            inner = get_args(kind)[0]
            return tuple(self._check(inner, _parse_item(_bare(inner), item)) for item in items if item != "")
        if get_origin(kind) is Literal:
            if value not in get_args(kind):
                raise PlanError(f"unknown `{self.name}` {quoted(value)}; there are {', '.join(get_args(kind))}")
            return value
        if kind is Path:
            return as_path(value, self.name)
        if kind in (int, float) and isinstance(value, Integral) and not isinstance(value, bool):
            value = kind(value)
        if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
            raise self._error(TYPE_NAMES.get(kind, f"a {kind.__name__}"), value)
        if kind is float and not math.isfinite(value):
            raise self._error("finite", value)
        if kind is int and abs(value) > MAX_INTEGER:
            raise self._error(f"at most {MAX_INTEGER}", value)
        return value

    def _error(self, expected: str, value: object) -> PlanError:
        return PlanError(f"`{self.name}` must be {expected}, got {quoted(repr(value))}")


def as_path(value: object, name: str = "out") -> Path:
    """Return the value of a parameter as a path; refuse values of other types."""
    if not isinstance(value, (str, PathLike)) or "\0" in str(value):
        raise PlanError(f"`{name}` must be a path, got {quoted(repr(value))}")
    return Path(value)


def options_of(cls: type[Options]) -> tuple[Option, ...]:
    """Return all options of a config by their flat names, in the order of their declaration."""
    return _options(cls, "", ())  # type: ignore[arg-type]


@functools.cache
def _annotations(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=True)


@functools.cache
def _options(cls: Any, prefix: str, path: tuple[str, ...]) -> tuple[Option, ...]:
    hints, docs = _annotations(cls), _field_docs(cls)
    options: list[Option] = []
    for item in fields(cls):
        annotation, place = hints[item.name], (*path, item.name)
        group, is_switch = _group(annotation), _optional(annotation)
        if group is None or is_switch:
            value = item.default if item.default_factory is MISSING else item.default_factory()
            kind, default = (bool, False) if group else (annotation, value)
            title = str((group or cls).__doc__).partition("\n")[0] if group or path else "Options"
            doc, single, name = docs.get(item.name, ""), bool(item.metadata.get("once")), prefix + item.name
            more: dict[str, Any] = {"help": doc, "section": title, "once": single, "group": group}
            options.append(Option(name=name, path=place, annotation=kind, default=default, **more))
        if group is not None:
            options += _options(group, f"{prefix}{item.name}_" if is_switch else prefix, place)  # type: ignore[arg-type]
    return tuple(options)


@contextmanager
def prefixed(prefix: str, cls: type[Options]) -> Iterator[None]:
    """Name the options of a group in errors as they are named in a config that has the group as a switch."""
    try:
        yield
    except SlimstateError as error:
        names = "|".join(option.name for option in options_of(cls))
        raise type(error)(re.sub(rf"`({names})`", rf"`{prefix}\1`", str(error))) from error


def _build(cls: type[C], values: Mapping[str, object], prefix: str, base: C | None) -> C:
    hints = _annotations(cls)  # type: ignore[arg-type]
    arguments: dict[str, Any] = {}
    for item in fields(cls):
        name, group = prefix + item.name, _group(hints[item.name])
        current = None if base is None else getattr(base, item.name)
        if group is None:
            if name in values:
                arguments[item.name] = values[name]
            elif base is not None:
                arguments[item.name] = current
        elif isinstance(values.get(name), group):
            arguments[item.name] = values[name]
        elif isinstance(values.get(name), Options):
            raise PlanError(f"`{name}` must be a {group.__name__}, got {type(values[name]).__name__}")
        elif not _optional(hints[item.name]):
            arguments[item.name] = _build(group, values, prefix, current)
        elif not isinstance(values.get(name), bool | None):
            raise PlanError(f"`{name}` must be true, false or a {group.__name__}, got {quoted(repr(values[name]))}")
        elif values.get(name, current is not None):
            arguments[item.name] = _build(group, values, f"{name}_", current)
        elif detail := next((key for key in values if key.startswith(f"{name}_")), None):
            raise PlanError(f"`{detail}` needs `{name}`")
    if not prefix:
        return cls(**arguments)
    with prefixed(prefix, cls):
        return cls(**arguments)


def _group(annotation: Any) -> type[Options] | None:
    bare = _bare(annotation)
    return bare if isinstance(bare, type) and issubclass(bare, Options) else None


def _bare(annotation: Any) -> Any:
    if get_origin(annotation) is Annotated:
        return _bare(get_args(annotation)[0])
    if get_origin(annotation) in (typing.Union, types.UnionType):
        inner = [part for part in get_args(annotation) if part is not type(None)]
        return _bare(inner[0]) if len(inner) == 1 else Any
    return annotation


def _optional(annotation: Any) -> bool:
    if get_origin(annotation) is Annotated:
        return _optional(get_args(annotation)[0])
    return type(None) in get_args(annotation)


def _parse_item(kind: Any, item: Any) -> Any:
    """Return an item of a comma-separated list, as a number if `kind` is one and the item can be read as one."""
    if not isinstance(item, str):
        return item
    if kind in (int, float):
        try:
            return kind(item)
        except ValueError:
            return item
    return item.strip()


def plain_value(value: Any) -> Any:
    """Return a value as JSON has it; a text or selector in memory by its name."""
    if isinstance(value, (list, tuple)):
        return [plain_value(item) for item in value]
    return value if isinstance(value, (bool, int, float, str)) or value is None else str(value)


@functools.cache
def _field_docs(cls: type) -> dict[str, str]:
    """Return the strings that stand below the fields of a class and of its bases, by field."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not issubclass(base, Options) or base is Options:
            continue
        body = typing.cast(ast.ClassDef, ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]).body
        for pair in pairwise(body):
            match pair:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(text)):
                    docs[name] = inspect.cleandoc(str(text)).replace("\n", " ")
    return docs
