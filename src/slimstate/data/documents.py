"""Divide a text into documents, and documents into the pieces that are tokenised.

A document is a whole source (`file`), a row of a table (`rows`), a line (`lines`), or the text between blank lines
(`blank`). By default plain text is one document, and so is a row of a table; but rows that are lines of one text, as in
WikiText, are joined. A row that is joined and does not end with a line end gets one.
"""

import io
from collections.abc import Iterable, Iterator
from itertools import chain, groupby

from slimstate.data.rows import Render, Texts
from slimstate.data.sources import Source, max_line_length, sources, too_long
from slimstate.system.value import Value

PIECE = 2**18  # characters of a document that are tokenised together
MAX_BATCH = 32 * PIECE  # characters that are tokenised in parallel
FIRST_ROWS = 64  # with text, which decide whether all rows are lines of one text


class Piece(Value):
    """Some text, and whether a document ends with it."""

    text: str
    ends: bool


class Reading:
    """A text and how it is divided into documents: as requested, or by default as its sources suggest.

    After some of it was read, `documents` is how it was divided (several names if its sources differ), `one_per_source`
    whether every text file and row was one document. `special_tokens` says which tokens stand around documents.
    """

    def __init__(self, source: str | Texts, documents: str | None = None, special_tokens: str = "end") -> None:
        self.source, self._text, self._requested = str(source), source, documents
        self.special_tokens = special_tokens
        self._seen: dict[str, None] = {}
        self.one_per_source = True

    @classmethod
    def of(cls, text: "str | Texts | Reading") -> "Reading":
        return text if isinstance(text, Reading) else cls(text)

    @property
    def documents(self) -> str | None:
        return ", ".join(self._seen) or self._requested

    def pieces(self, render: Render | None = None) -> Iterator[Piece]:
        """Yield the text in pieces; `render` turns chat messages into text."""
        for source in sources(self._text, render):
            documents, texts = _choose_documents(source, self._requested)
            self._seen[documents] = None
            self.one_per_source = self.one_per_source and documents == ("rows" if source.rows else "file")
            yield from _pieces(documents, texts)

    def batches(self, first: int, render: Render | None = None) -> Iterator[list[Piece]]:
        """Yield batches of pieces, each larger than the one before, so that little is read where little is needed.

        A tokenizer divides a batch between the cores. The first one has about `first` characters, within limits.
        """
        batch: list[Piece] = []
        size, target = 0, min(max(PIECE, first), MAX_BATCH)
        for piece in self.pieces(render):
            batch.append(piece)
            size += len(piece.text)
            if size >= target:
                yield batch
                batch, size, target = [], 0, min(2 * target, MAX_BATCH)
        if batch:
            yield batch


def _choose_documents(source: Source, requested: str | None) -> tuple[str, Iterator[str]]:
    """Return how to divide a source, and its texts: rows if each is a document, otherwise blocks of one text."""
    if not source.rows:
        return "file" if requested in (None, "rows") else requested, source.texts
    documents, texts = requested, source.texts
    if documents is None:
        first, are_lines = _first_rows(texts)
        documents, texts = "file" if are_lines else "rows", chain(first, texts)
    if documents == "rows":
        return documents, texts
    return documents, (row if row.endswith("\n") else f"{row}\n" for row in texts)


def _first_rows(rows: Iterator[str]) -> tuple[list[str], bool]:
    """Return the first rows, as few as possible, and whether they are lines of one text.

    They are if each of them is empty or ends with its only line end.
    """
    first: list[str] = []
    count = 0
    for row in rows:
        first.append(row)
        if row and row.find("\n") != len(row) - 1:
            return first, False
        count += row != ""
        if count == FIRST_ROWS:
            break
    return first, any(first)


def _pieces(documents: str, texts: Iterator[str]) -> Iterator[Piece]:
    if documents == "rows":
        yield from (Piece(text=row, ends=True) for row in texts)
    elif documents == "file":
        yield from _document_pieces(texts)
    elif documents == "lines":
        yield from (Piece(text=line, ends=True) for line in _lines(texts) if line.strip())
    else:
        for is_blank, document in groupby(_lines(texts), lambda line: not line.strip()):
            yield from () if is_blank else _document_pieces(document)


def _document_pieces(texts: Iterable[str]) -> Iterator[Piece]:
    """Yield one document in pieces that end with a line, so that no word is divided.

    Where they end depends on the text alone, not on the blocks it is read in.
    """
    rest: list[str] = []
    length, limit = 0, max_line_length()
    for block in _blocks(texts, PIECE):
        end = block.rfind("\n") + 1
        if end:
            yield Piece(text="".join((*rest, block[:end])), ends=False)
            rest, length = [], 0
        rest.append(block[end:])
        length += len(block) - end
        if length > limit:
            raise too_long("the text")
    yield Piece(text="".join(rest), ends=True)


def _blocks(texts: Iterable[str], size: int) -> Iterator[str]:
    """Yield the same characters in blocks of `size`; the last may be shorter."""
    rest: list[str] = []
    length = 0
    for text in texts:
        rest.append(text)
        length += len(text)
        if length >= size:
            joined, end = "".join(rest), length - length % size
            yield from (joined[start : start + size] for start in range(0, end, size))
            rest, length = [joined[end:]], length - end
    if length:
        yield "".join(rest)


def _lines(texts: Iterable[str]) -> Iterator[str]:
    """Yield lines with their line ends; the last may have none."""
    for piece in _document_pieces(texts):
        yield from io.StringIO(piece.text, newline="\n")
