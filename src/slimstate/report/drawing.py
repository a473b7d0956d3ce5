"""Figures as inline SVG for the page."""

from __future__ import annotations

import re
from collections.abc import Mapping

from markupsafe import Markup
from matplotlib.figure import Figure

from slimstate.report import plots

PAGE_WIDTH = 0.78  # of the width in print: on a phone a drawing is as wide as the screen, and its text stays readable
OPENING = Markup('<svg role="{}" aria-label="{}" class="drawing"')
MARK = Markup('id="{}" class="dot" tabindex="0" role="img" aria-label="{}" data-tip="{}"')


def figure_id(name: str, number: int) -> str:
    """Return the prefix of a figure's ids: its name, with a number from the second figure of a kind on."""
    return name if number == 0 else f"{name}-{number + 1}"


def drawing(figure: Figure, name: str, label: str, tips: Mapping[str, str] | None = None) -> Markup:
    """Return a figure as SVG whose ids begin with `name`; `tips` are texts for elements, by id without that prefix."""
    figure.set_figwidth(figure.get_figwidth() * PAGE_WIDTH)
    text = re.sub(r"<!--.*?-->", "", plots.svg(figure, name), flags=re.DOTALL)
    text = re.sub(r">\s+<", "><", text).replace(" \n", " ")
    text = text.replace("<svg", OPENING.format("group" if tips else "img", label), 1)
    for identifier, tip in (tips or {}).items():
        text = text.replace(f'id="{name}-{identifier}"', MARK.format(f"{name}-{identifier}", tip, tip), 1)
    return Markup(text)
