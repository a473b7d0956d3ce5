"""The text of a row of a table or of an item in memory: a string, its `text` or `page`, or its chat `messages`."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Sized
from itertools import tee
from pathlib import Path
from typing import Any

from slimstate.system.errors import DataError, quoted, reason_of

Render = Callable[[Sequence[Mapping[str, Any]]], str]  # the messages of a chat -> its text


COLUMNS = ("text", "page", "messages")  # of a table, the first that there is; lm-eval's WikiText has pages


class Texts:
    """Texts in memory: strings, chats, or rows of a dataset; each is a document.

    Items of an iterator are stored as they are read, so that they can be read again.
    """

    def __init__(self, items: Iterable[object]) -> None:
        if _is_chat(items):
            items = [items]
        count = f"{len(items)} texts" if isinstance(items, Sized) else "texts"
        self.name = f"{count} in memory" if count != "1 texts" else "1 text in memory"
        self.items = items

    def __str__(self) -> str:
        return self.name

    def __iter__(self) -> Iterator[object]:
        if not isinstance(self.items, Iterator):
            return iter(self.items)
        self.items, items = tee(self.items)
        return items


def as_text_source(text: str | Path | Texts | Iterable[object]) -> str | Texts:
    """Return the name of a file, a folder or a dataset as a string, and anything else as texts in memory."""
    if isinstance(text, (str, Path)):
        if {"\n", "\0"} & {*str(text)}:
            raise DataError("a string must name a file or a dataset: give text itself as a list of strings, [text]")
        if not str(text):
            raise DataError("the name of a text must not be empty")
        return str(text)
    if isinstance(text, Texts):
        return text
    if hasattr(text, "columns"):
        raise DataError("give the column of the table that has the text, such as table['text']")
    if isinstance(text, (bytes, Mapping)) or not isinstance(text, Iterable):
        raise DataError(f"the text must be a path, or a list of strings or chats, got {type(text).__name__}")
    return Texts(text)


def text_column(names: Container[str]) -> str:
    """Return the column that has the text of a table."""
    return next((column for column in COLUMNS if column in names), COLUMNS[0])


def row_text(row: object, render: Render | None) -> str:
    """Return the text of a row; raise a LookupError if it has none."""
    if isinstance(row, str):
        return row
    messages: Any = row
    if isinstance(row, Mapping):
        column = text_column(row)
        if column != "messages":
            return "" if row[column] is None else str(row[column])
        messages = row[column]
    if not _is_chat(messages):
        raise LookupError("neither text nor messages")
    if render is None:
        raise DataError("chat messages need the chat template of a model's tokenizer, and there is no model here")
    return render(list(messages))


def renderer(tokenizer: Any) -> Render:
    """Return a function that turns messages into text by the template of a tokenizer."""

    def render(messages: Sequence[Mapping[str, Any]]) -> str:
        if not getattr(tokenizer, "chat_template", None):
            raise DataError("the text has chat messages, but the tokenizer of the model has no chat template")
        try:
            return str(tokenizer.apply_chat_template(messages, tokenize=False))
        except Exception as error:  # a template is a program, which can raise anything
            first = quoted(messages[0] if messages else "none")
            raise DataError(f"the chat template refuses the messages {first}: {reason_of(error)}") from error

    return render


def _is_chat(row: object) -> bool:
    """Return whether this is a list of messages, each with a role."""
    if not isinstance(row, (list, tuple)) or not row:
        return False
    return all(isinstance(message, Mapping) and "role" in message for message in row)
