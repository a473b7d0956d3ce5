"""Convert dataclasses to JSON and back. The annotations of the fields are the schema.

`from_json` converts JSON to an annotated type, with msgspec; `to_json` is the way back. Fields without a default are
required, fields that a type does not have are ignored, and fields with the metadata `IN_MEMORY` are not written.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, ValidationError

from slimstate.system.errors import MAX_LINE, SlimstateError, quoted
from slimstate.system.json_files import is_unicode, plain
from slimstate.system.value import Value

__all__ = ["IN_MEMORY", "NON_EMPTY", "Count", "Positive", "ValidationError", "Value", "Whole", "from_json", "to_json"]

T = TypeVar("T")
MAX_NUMBER = 1e300  # arithmetic on larger numbers overflows
IN_MEMORY = {"in_memory": True}
NON_EMPTY = Meta(min_length=1)
Positive = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=0)]
Whole = Annotated[int, Meta(ge=1)]


def is_number(value: object) -> bool:
    """Return whether it is a finite number that can be computed with."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -MAX_NUMBER < value < MAX_NUMBER


def from_json(kind: type[T], data: object) -> T:
    """Return JSON as a value of an annotated type; raise a one-line ValidationError that names the wrong field."""
    try:
        check_values(data)
        return msgspec.convert(data, kind)
    except (ValidationError, SlimstateError) as error:  # the latter from a value that checks itself
        reason, _, place = str(error).partition(" - at `$")
        where = f"{place.strip('`.')}: " if place else ""
        raise ValidationError(quoted(f"{where}{reason[:1].lower()}{reason[1:]}", MAX_LINE // 2)) from error


def check_values(data: object, place: str = "$") -> None:
    """Refuse numbers that are not finite and text that is not Unicode, which annotations do not exclude."""
    if isinstance(data, Mapping):
        for name, item in data.items():
            check_values(item, f"{place}.{name}")
    elif isinstance(data, (list, tuple)):
        for number, item in enumerate(data):
            check_values(item, f"{place}[{number}]")
    elif isinstance(data, float) or (isinstance(data, int) and not isinstance(data, bool)):
        if not is_number(data):
            raise ValidationError(f"expected a finite number below {MAX_NUMBER:g} - at `{place}`")
    elif isinstance(data, str) and not is_unicode(data):
        raise ValidationError(f"expected valid Unicode - at `{place}`")


def to_json(value: Any) -> Any:
    """Return a dataclass, and all that is in it, as strict JSON."""
    if is_dataclass(value) and not isinstance(value, type):
        names = [item.name for item in fields(value) if "in_memory" not in item.metadata]
        return {name: to_json(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    return plain(value)
