"""HTML that cannot be broken by what it shows: a string is escaped on its way in unless it is `Html` already."""

from __future__ import annotations

import html
from collections.abc import Iterable

GENERATOR = '<meta name="generator" content="slimstate">'  # by which a page of ours is known


class Html(str):
    """Markup, as opposed to text."""

    __slots__ = ()


def escaped(value: object) -> Html:
    return value if isinstance(value, Html) else Html(html.escape(str(value)))


def joined(parts: Iterable[object], between: str = "") -> Html:
    """Parts one after the other; what is None is left out."""
    return Html(escaped(between).join(escaped(part) for part in parts if part is not None))


def element(name: str, *children: object, **attributes: object) -> Html:
    """A tag around its children. `class_` is class and `data_tip` data-tip; None and False leave an attribute out."""
    return Html(f"<{name}{attributes_of(attributes)}>{joined(children)}</{name}>")


def variable(name: str, value: object) -> str:
    """A variable of CSS, for a style attribute."""
    return f"--{name}:{value}"


def attributes_of(attributes: dict[str, object]) -> Html:
    words = []
    for key, value in attributes.items():
        name = key.rstrip("_").replace("_", "-")
        if value is True:
            words.append(f" {name}")
        elif value is not None and value is not False:
            words.append(f' {name}="{html.escape(str(value))}"')
    return Html("".join(words))
