"""The parts that sections are made of: figures, tables, lists of facts, code to copy."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from slimstate.report import plots
from slimstate.report.markup import Html, attributes_of, element, escaped, joined

NARROWER = 0.78  # than in print: on a phone a drawing is as wide as the screen, and its words are still to be read


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page that the table of contents points to."""

    anchor: str
    title: str
    body: Html

    def render(self) -> Html:
        return element("section", element("h2", self.title), self.body, id=self.anchor)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What a table shows, and what it sorts by where that is something else."""

    shown: object
    value: float | str | None = None
    numeric: bool = False


def prefix(name: str, number: int) -> str:
    """The ids of the first figure of a kind begin with its name, those of further ones also with a number."""
    return name if number == 0 else f"{name}-{number + 1}"


def drawing(figure: Figure, name: str, label: str, tips: Mapping[str, str] | None = None) -> Html:
    """A figure as inline SVG; `tips` tells what to say at elements by their id without the prefix."""
    figure.set_figwidth(figure.get_figwidth() * NARROWER)
    text = plots.svg(figure, name)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r">\s+<", "><", text).replace(" \n", " ")
    about = attributes_of({"role": "group" if tips else "img", "aria_label": label, "class_": "drawing"})
    text = text.replace("<svg", f"<svg{about}", 1)
    for identifier, tip in (tips or {}).items():
        mark = f'id="{name}-{identifier}"'
        extra = attributes_of({"class_": "dot", "tabindex": 0, "role": "img", "aria_label": tip, "data_tip": tip})
        text = text.replace(mark, f"{mark}{extra}", 1)
    return Html(text)


def figure(picture: Html, caption: object) -> Html:
    """A drawing with its caption, beside it where there is room."""
    return element("figure", element("div", picture, class_="scroll"), element("figcaption", caption), class_="plot")


def facts(entries: Iterable[tuple[str, object]]) -> Html:
    """Names and what they are; what is None is left out."""
    rows = (
        element("div", element("dt", name), element("dd", value)) for name, value in entries if value is not None
    )  # fmt: skip
    return element("dl", *rows, class_="facts")


def sortable(caption: str, columns: Sequence[str], rows: Iterable[tuple[Sequence[Cell], Mapping[str, object]]]) -> Html:
    """A table that is sorted by a column when its header is pressed; rows are cells and attributes."""
    heads = (
        element("th", element("button", column, type="button"), scope="col", aria_sort="none") for column in columns
    )
    body = (element("tr", *map(_cell, cells), **attributes) for cells, attributes in rows)
    whole = element(
        "table",
        element("caption", element("span", caption)),
        element("thead", element("tr", *heads)),
        element("tbody", *body),
        class_="sortable",
    )
    return element("div", whole, class_="scroll")


def _cell(cell: Cell) -> Html:
    return element("td", cell.shown, class_="number" if cell.numeric else None, data_value=cell.value)


def listing(language: str, text: object) -> Html:
    """Code with a button that copies it."""
    button = element("button", "Copy", type="button", class_="copy", aria_label=f"Copy {language}")
    return element(
        "div", button, element("pre", element("code", text), tabindex=0), class_=f"listing {language.lower()}"
    )


def command_lines(lines: Sequence[str]) -> Html:
    """Commands that break before an option and nowhere else, and are plain lines when copied."""
    words = ([element("span", word, class_="word") for word in re.split(r" (?=--)", line)] for line in lines)
    return joined((element("span", joined(line, " "), class_="line") for line in words), "\n")


def note(*children: object) -> Html:
    return element("p", *children, class_="note")


def code(text: object) -> Html:
    return element("code", text)


def digest(text: object) -> Html:
    """The start of a fingerprint, the whole of it on demand."""
    if not text:
        return escaped("–")
    return element("code", f"{str(text).removeprefix('sha256:')[:12]}…", title=text, data_tip=text)
