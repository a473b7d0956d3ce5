"""The text of a row: a string, the `text` of an object, or its `messages` in the words of the tokenizer's template.

Rows come from tables, and from programs that hold their texts in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

from slimstate.system.errors import DataError, quoted, reason_of

Render = Callable[[Sequence[Mapping[str, Any]]], str]  # the messages of a chat -> its text


class Texts:
    """Texts that a program holds: strings, chats, or rows of a dataset; each is a document.

    What can be read only once is kept as far as it was read, so that it can be read again.
    """

    def __init__(self, items: Iterable[object]) -> None:
        if _is_chat(items):
            items = [items]
        counted = f"{len(items)} texts" if isinstance(items, Sized) else "texts"
        self.name = f"{counted} in memory" if counted != "1 texts" else "1 text in memory"
        self._items = _Kept(items) if isinstance(items, Iterator) else items

    def __str__(self) -> str:
        return self.name

    def __iter__(self) -> Iterator[object]:
        return iter(self._items)


class _Kept:
    """An iterator that can be read again from its beginning."""

    def __init__(self, items: Iterator[object]) -> None:
        self._more, self._seen = items, list[object]()

    def __iter__(self) -> Iterator[object]:
        place = 0
        while True:
            if place == len(self._seen):
                for item in self._more:
                    self._seen.append(item)
                    break
                else:
                    return
            yield self._seen[place]
            place += 1


def given_text(text: str | Path | Texts | Iterable[object]) -> str | Texts:
    """A text as it is given: a string or path names a file, a folder or a dataset; anything else holds the texts."""
    if isinstance(text, (str, Path)):
        if "\n" in str(text):
            raise DataError("a string names a file or a dataset: give text itself as a list of strings, [text]")
        return str(text)
    if isinstance(text, Texts):
        return text
    if isinstance(text, (bytes, Mapping)) or not isinstance(text, Iterable):
        raise DataError(f"{type(text).__name__} is no text: give a path, or strings or chats in a list")
    return Texts(text)


def row_text(row: object, render: Render | None) -> str:
    """The text of a row; LookupError where it holds none."""
    if isinstance(row, str):
        return row
    if isinstance(row, Mapping) and ("text" in row or "messages" not in row):
        return "" if row["text"] is None else str(row["text"])
    messages: Any = row["messages"] if isinstance(row, Mapping) else row
    if not _is_chat(messages):
        raise LookupError("neither text nor messages")
    if render is None:
        raise DataError("chat messages become text by the template of a model's tokenizer, and there is no model here")
    return render(list(messages))


def renderer(tokenizer: Any) -> Render:
    """What turns messages into text for a model."""

    def render(messages: Sequence[Mapping[str, Any]]) -> str:
        if not getattr(tokenizer, "chat_template", None):
            raise DataError("the text holds chat messages, and the tokenizer of the model has no chat template")
        try:
            return str(tokenizer.apply_chat_template(messages, tokenize=False))
        except Exception as error:  # of many kinds: a template is a program
            first = quoted(messages[0] if messages else "none")
            raise DataError(f"the chat template refuses the messages {first}: {reason_of(error)}") from error

    return render


def _is_chat(row: object) -> bool:
    """Messages, each with a role."""
    if not isinstance(row, (list, tuple)) or not row:
        return False
    return all(isinstance(message, Mapping) and "role" in message for message in row)
