"""The base of values, which never change."""

from dataclasses import Field, dataclass
from typing import Any, ClassVar

from typing_extensions import dataclass_transform


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Value:
    """Base of frozen dataclasses that take keyword arguments alone; subclasses need no decorator."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        dataclass(frozen=True, kw_only=True)(cls)
