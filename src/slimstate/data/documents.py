"""How the documents of a text are told apart, and the pieces in which they are tokenised.

A document is a whole source (`file`), a row of a table (`rows`), a line (`lines`), or what stands between blank lines
(`blank`). Unless it is said, plain text is one document and a row of a table is one; but rows that are the lines of one
text, as those of WikiText, are joined again. A row that is joined and ends without a line end gets one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, groupby, islice

from slimstate.data.rows import Render, Texts
from slimstate.data.sources import Source, longest_line, sources, too_long
from slimstate.system.errors import DataError

DOCUMENTS = ("lines", "blank", "file", "rows")
PIECE = 2**18  # characters of a document that are tokenised as one
MOST = 32 * PIECE  # characters that are tokenised side by side
FIRST_ROWS = 64  # that tell whether all rows are lines of one text


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Some text, and whether a document ends with it."""

    text: str
    ends: bool


def check_documents(documents: str | None) -> None:
    if documents is not None and documents not in DOCUMENTS:
        raise DataError(f"`documents` {documents}: there are {', '.join(DOCUMENTS)}")


class Reading:
    """A text, and how its documents are told apart: as asked for, or as each source of it suggests.

    Once some of it was read, `documents` says how that was done; several names where its sources differ. It is `usual`
    where every file of text was one document and every row was one.
    """

    def __init__(self, source: str | Texts, documents: str | None = None) -> None:
        check_documents(documents)
        self.source, self._where, self._asked = str(source), source, documents
        self._found: dict[str, None] = {}
        self.usual = True

    @classmethod
    def of(cls, text: str | Texts | Reading) -> Reading:
        return text if isinstance(text, Reading) else cls(text)

    @property
    def documents(self) -> str | None:
        return ", ".join(self._found) or self._asked

    def pieces(self, render: Render | None = None) -> Iterator[Piece]:
        """`render` turns chat messages into text."""
        for source in sources(self._where, render):
            documents, texts = _told_apart(source, self._asked)
            self._found[documents] = None
            self.usual = self.usual and documents == ("rows" if source.rows else "file")
            yield from _pieces(documents, texts)

    def batches(self, first: int, render: Render | None = None) -> Iterator[list[Piece]]:
        """Ever more pieces together, which a tokenizer spreads over the cores: little is read where little is needed.

        The first `first` characters come together, within the bounds of memory.
        """
        batch: list[Piece] = []
        size, wanted = 0, min(max(PIECE, first), MOST)
        for piece in self.pieces(render):
            batch.append(piece)
            size += len(piece.text)
            if size >= wanted:
                yield batch
                batch, size, wanted = [], 0, min(2 * wanted, MOST)
        if batch:
            yield batch


def _told_apart(source: Source, asked: str | None) -> tuple[str, Iterator[str]]:
    """How, and the texts: rows as they are where each is a document, otherwise blocks of one text."""
    if not source.rows:
        return "file" if asked in (None, "rows") else asked, source.texts
    documents, texts = asked, source.texts
    if documents is None:
        first, are_lines = _beginning(texts)
        documents, texts = "file" if are_lines else "rows", chain(first, texts)
    if documents == "rows":
        return documents, texts
    return documents, (row if row.endswith("\n") else f"{row}\n" for row in texts)


def _beginning(rows: Iterator[str]) -> tuple[list[str], bool]:
    """The first rows, no more than it takes to see whether all of them are lines of one text.

    They are where every one that is not empty ends with a line end and has no other.
    """
    first: list[str] = []
    for row in islice(rows, FIRST_ROWS):
        first.append(row)
        if row and row.find("\n") != len(row) - 1:
            return first, False
    return first, any(first)


def _pieces(documents: str, texts: Iterator[str]) -> Iterator[Piece]:
    if documents == "rows":
        yield from (Piece(text=row, ends=True) for row in texts)
    elif documents == "file":
        yield from _in_pieces(texts)
    elif documents == "lines":
        yield from (Piece(text=line, ends=True) for line in _lines(texts) if line.strip())
    else:
        for blank, document in groupby(_lines(texts), lambda line: not line.strip()):
            yield from () if blank else _in_pieces(document)


def _in_pieces(texts: Iterable[str]) -> Iterator[Piece]:
    """One document in pieces that end with a line, so that no word is torn.

    Where they end depends on the text alone, and not on the blocks it comes in.
    """
    held: list[str] = []
    length, most = 0, longest_line()
    for block in _blocks(texts, PIECE):
        cut = block.rfind("\n") + 1
        if cut:
            yield Piece(text="".join((*held, block[:cut])), ends=False)
            held, length = [], 0
        held.append(block[cut:])
        length += len(block) - cut
        if length > most:
            raise too_long("the text")
    yield Piece(text="".join(held), ends=True)


def _blocks(texts: Iterable[str], size: int) -> Iterator[str]:
    """The same characters in blocks of that size, of which the last may be shorter."""
    held: list[str] = []
    length = 0
    for text in texts:
        held.append(text)
        length += len(text)
        if length >= size:
            whole = "".join(held)
            rest = length % size
            yield from (whole[start : start + size] for start in range(0, length - rest, size))
            held, length = [whole[length - rest :]], rest
    if length:
        yield "".join(held)


def _lines(texts: Iterable[str]) -> Iterator[str]:
    """With their line ends; the last of a text may have none."""
    held: list[str] = []
    length, most = 0, longest_line()
    for text in texts:
        first, *others = text.split("\n")
        held.append(first)
        length += len(first)
        if others:
            yield "".join((*held, "\n"))
            yield from (f"{line}\n" for line in others[:-1])
            held, length = [others[-1]], len(others[-1])
        if length > most:
            raise too_long("the text")
    if length:
        yield "".join(held)
