"""Where text lies: .txt, .jsonl and .parquet files, .xz or .gz of one, folders of them, `datasets` names.

Line ends are universal: CRLF and CR are read as LF, whatever the source. A line, and what a small file unpacks to, have
bounds, so that no file keeps a machine busy for hours: SLIMSTATE_MAX_LINE_MB sets that of a line.
"""

from __future__ import annotations

import gzip
import io
import json
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from slimstate.data.rows import Render, Texts, row_text
from slimstate.system import hub
from slimstate.system.errors import DataError, quoted, reason_of
from slimstate.system.input_files import open_regular
from slimstate.system.json_files import is_unicode
from slimstate.system.paths import expand_home

BLOCK = 2**18  # characters of plain text that are read at once
FORMATS = (".txt", ".jsonl", ".parquet")
COMPRESSIONS: dict[str, Callable[[IO[bytes]], Any]] = {".xz": lzma.open, ".gz": gzip.open}
MOST_PACKED, SURELY = 200, 2**22  # times its size that a file may unpack to, and bytes that any may


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file or a dataset. What it holds can be read once: blocks of one text, or, with `rows`, the text of each."""

    rows: bool
    texts: Iterator[str]


def sources(name: str | Texts, render: Render | None = None) -> Iterator[Source]:
    """The file, the files of the folder in order, the dataset of the hub, or the texts themselves."""
    if isinstance(name, Texts):
        yield Source(rows=True, texts=_in_memory(name, render))
        return
    path = expand_home(name)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if _format(file) is not None and not file.is_dir())
        if not files:
            raise DataError(f"{quoted(name)} holds no {', '.join(FORMATS)} file")
        yield from (_source(file, render) for file in files)
    elif path.is_file():
        yield _source(path, render)
    elif _format(path) is not None or name.startswith(("/", "./", "../", "~")):
        raise DataError(f"no data at {quoted(name)}")
    else:
        yield Source(rows=True, texts=_from_hub(name, render))


def _format(path: Path) -> str | None:
    """The format that a file's name tells, compressed or not."""
    suffixes = [suffix for suffix in path.suffixes if suffix not in COMPRESSIONS]
    return suffixes[-1] if suffixes and suffixes[-1] in FORMATS else None


def _source(path: Path, render: Render | None) -> Source:
    kind = _format(path)
    if kind is None:
        raise DataError(f"{quoted(path)}: not one of {', '.join(FORMATS)}, or .xz or .gz of one")
    return Source(rows=kind != ".txt", texts=_read(path, kind, render))


def longest_line() -> int:
    """Characters, or bytes, that a line may have."""
    given = os.environ.get("SLIMSTATE_MAX_LINE_MB", "64")
    try:
        return max(1, int(float(given) * 2**20))
    except (ValueError, OverflowError) as error:
        raise DataError(f"SLIMSTATE_MAX_LINE_MB is {quoted(given)}: give a number of MiB") from error


def too_long(where: str) -> DataError:
    most = longest_line() / 2**20
    return DataError(
        f"{where} has a line of more than {most:g} MiB; `max_line_mb`, or SLIMSTATE_MAX_LINE_MB, sets what it may have"
    )


class Unpacked(io.RawIOBase):
    """What a compressed file holds, as long as it is not much more than any text would be packed to.

    The beginning is unpacked before any of it is given out, so that little time goes into what is no text.
    """

    def __init__(self, file: IO[bytes], unpack: Callable[[IO[bytes]], Any], name: str) -> None:
        self._file, self._packed, self._name = file, unpack(file), name
        self._begin, self._seen = io.BytesIO(), 0

    def readable(self) -> bool:
        return True

    def readinto(self, memory: Any) -> int:
        if not self._seen:
            self._begin = io.BytesIO(self._unpacked(SURELY + 1))
        data = self._begin.read(len(memory)) or self._unpacked(len(memory))
        memory[: len(data)] = data
        return len(data)

    def _unpacked(self, size: int) -> bytes:
        data: bytes = self._packed.read(size)
        self._seen += len(data)
        if self._seen > max(SURELY, MOST_PACKED * self._file.tell()):
            raise _no_text(self._name)
        return data


def _no_text(name: str) -> DataError:
    return DataError(f"{name} unpacks to more than {MOST_PACKED} times its size: that is no text")


def _read(path: Path, kind: str, render: Render | None) -> Iterator[str]:
    reader = {".txt": _plain, ".jsonl": _json_lines, ".parquet": _parquet}[kind]
    unpack = COMPRESSIONS.get(path.suffix)
    try:
        with open_regular(path, DataError) as file:
            if unpack is None:
                yield from reader(file, path, render)
            else:
                yield from reader(io.BufferedReader(Unpacked(file, unpack, quoted(path)), BLOCK), path, render)
    except UnicodeDecodeError as error:
        raise DataError(f"{quoted(path)} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"cannot read {quoted(path)}: {reason_of(error)}") from error


def _plain(file: IO[bytes], path: Path, render: Render | None) -> Iterator[str]:
    text = io.TextIOWrapper(file, encoding="utf-8")  # which makes every line end LF
    while block := text.read(BLOCK):
        yield block


def _json_lines(file: IO[bytes], path: Path, render: Render | None) -> Iterator[str]:
    lines, most = io.TextIOWrapper(file, encoding="utf-8"), longest_line()
    for number, line in enumerate(iter(lambda: lines.readline(most + 1), ""), start=1):
        if len(line) > most:
            raise too_long(f"{quoted(path)}, line {number},")
        if not line.strip():
            continue
        try:
            row = row_text(_object(json.loads(line)), render)
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            wanted = "a JSON object with a 'text' field, or with a chat in 'messages'"
            raise DataError(f"{quoted(path)}, line {number}: not {wanted}") from error
        if not is_unicode(row):
            raise DataError(f"{quoted(path)}, line {number}: half of a surrogate pair, which is no text")
        yield _unified(row)


def _parquet(file: IO[bytes], path: Path, render: Render | None) -> Iterator[str]:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    try:
        table = parquet.ParquetFile(file if path.suffix == ".parquet" else io.BytesIO(file.read()))
        column = "text" if "text" in table.schema_arrow.names else "messages"
        _check_packing(table.metadata, path)
        for batch in table.iter_batches(batch_size=256, columns=[column]):
            for row in batch.column(0).to_pylist():
                text = row_text({column: row}, render)
                if len(text) > longest_line():
                    raise too_long(quoted(path))
                yield _unified(text)
    except (arrow.ArrowException, LookupError) as error:
        raise DataError(f"{quoted(path)}: not a Parquet file with a 'text' column, or chats in 'messages'") from error


def _check_packing(table: Any, path: Path) -> None:
    """Refuse columns that hold much more than any text would be packed to, before one is unpacked."""
    for group in range(table.num_row_groups):
        columns = [table.row_group(group).column(number) for number in range(table.num_columns)]
        for column in columns:
            if column.total_uncompressed_size > max(SURELY, MOST_PACKED * column.total_compressed_size):
                raise _no_text(quoted(path))


def _from_hub(name: str, render: Render | None) -> Iterator[str]:
    """A dataset streamed from the hub: NAME, NAME:CONFIG or NAME:CONFIG:SPLIT, by default train."""
    if not hub.reachable():
        raise DataError(f"no file {quoted(name)}, and the hub cannot be reached from here for a dataset of that name")
    from datasets import load_dataset

    repository, config, split = (*name.split(":", 2), "", "")[:3]
    try:
        for row in load_dataset(repository, config or None, split=split or "train", streaming=True):
            yield _unified(row_text(row, render))
    except DataError:
        raise
    except Exception as error:
        raise DataError(
            f"no file {quoted(name)}, and no dataset of that name can be had: {hub.reason(error)}"
        ) from error


def _in_memory(texts: Texts, render: Render | None) -> Iterator[str]:
    for number, row in enumerate(texts, start=1):
        try:
            text = row_text(row, render)
        except LookupError as error:
            kind = f"it is {quoted(repr(row))}: give strings, chats, or rows with `text` or `messages`"
            raise DataError(f"text {number} of {texts} is no text: {kind}") from error
        if not is_unicode(text):
            raise DataError(f"text {number} of {texts}: half of a surrogate pair, which is no text")
        yield _unified(text)


def _object(row: object) -> object:
    """A row of a table is an object with fields."""
    if not isinstance(row, dict):
        raise TypeError(type(row).__name__)
    return row


def _unified(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text
