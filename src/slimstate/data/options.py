"""Options of every command that reads text."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from slimstate.data.rows import as_text_source
from slimstate.system.options import Options

Seed = Annotated[int, Meta(ge=0, le=2**32 - 1)]
# a path, a dataset's name, or strings, chats or rows in a list or any iterable
TextSource = Annotated[Any, as_text_source]


class DocumentOptions(Options):
    """Text"""

    documents: Literal["lines", "blank", "file", "rows"] | None = None
    """What is a document, after which an end-of-text token stands: lines, blank (text between blank lines), file or
    rows; default: a .txt file or a row of a table; rows that are lines of one text are joined."""


class TextOptions(DocumentOptions):
    """Text"""

    seed: Seed = 0
    """Seed of everything that is drawn at random."""
