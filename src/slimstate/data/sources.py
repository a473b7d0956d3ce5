"""Read text from .txt, .raw, .jsonl and .parquet files, .xz or .gz of one, folders of them, and datasets of the hub.

CRLF and CR are read as LF, whatever the source. The length of a line and the ratio of compression are limited, so that
no file keeps a machine busy for hours; SLIMSTATE_MAX_LINE_MB sets the limit of a line.
"""

import gzip
import io
import json
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from slimstate.data.rows import Render, Texts, row_text, text_column
from slimstate.system import hub
from slimstate.system.errors import DataError, quoted, reason_of
from slimstate.system.input_files import expand_home, open_regular
from slimstate.system.json_files import is_unicode
from slimstate.system.value import Value

BLOCK = 2**18  # characters of plain text read at once
PLAIN = (".txt", ".raw")  # WikiText is published as wiki.test.raw
FORMATS = (*PLAIN, ".jsonl", ".parquet")
COMPRESSIONS: dict[str, Callable[[IO[bytes]], Any]] = {".xz": lzma.open, ".gz": gzip.open}
MAX_RATIO, ALWAYS_ALLOWED = 200, 2**22  # of compression, and bytes that any file may expand to


class Source(Value):
    """A file or a dataset, to be read once: blocks of one text, or, with `rows`, the text of each row."""

    rows: bool
    texts: Iterator[str]


def sources(name: str | Texts, render: Render | None = None) -> Iterator[Source]:
    """Yield the sources of a text: a file, the files of a folder in order, a dataset of the hub, texts in memory."""
    if isinstance(name, Texts):
        yield Source(rows=True, texts=_in_memory(name, render))
        return
    path = expand_home(name)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if _format(file) is not None and not file.is_dir())
        if not files:
            raise DataError(f"{quoted(name)} has no {', '.join(FORMATS)} file")
        yield from (_source(file, render) for file in files)
    elif path.is_file():
        yield _source(path, render)
    elif _format(path) is not None or name.startswith(("/", "./", "../", "~")):
        raise DataError(f"no data at {quoted(name)}")
    else:
        yield Source(rows=True, texts=_from_hub(name, render))


def is_same_text(one: str | Texts, other: str | Texts) -> bool:
    """Return whether two sources are the same file, folder or dataset, or the same object in memory."""
    if isinstance(one, Texts) or isinstance(other, Texts):
        return isinstance(one, Texts) and isinstance(other, Texts) and one.items is other.items
    return os.path.realpath(expand_home(one)) == os.path.realpath(expand_home(other))


def _format(path: Path) -> str | None:
    """Return the format by the name of a file, which may be compressed."""
    suffixes = [suffix for suffix in path.suffixes if suffix not in COMPRESSIONS]
    return suffixes[-1] if suffixes and suffixes[-1] in FORMATS else None


def _source(path: Path, render: Render | None) -> Source:
    kind = _format(path)
    if kind is None:
        raise DataError(f"{quoted(path)}: not one of {', '.join(FORMATS)}, or .xz or .gz of one")
    return Source(rows=kind not in PLAIN, texts=_read(path, kind, render))


def max_line_length() -> int:
    """Return the characters, or bytes, that a line may have."""
    limit = os.environ.get("SLIMSTATE_MAX_LINE_MB", "64")
    try:
        return max(1, int(float(limit) * 2**20))
    except (ValueError, OverflowError) as error:
        raise DataError(f"SLIMSTATE_MAX_LINE_MB must be a number of MiB, got {quoted(limit)}") from error


def too_long(where: str) -> DataError:
    limit = f"{max_line_length() / 2**20:g} MiB"
    return DataError(f"{where} has a line of more than {limit}; `max_line_mb` (SLIMSTATE_MAX_LINE_MB) allows more")


class Decompressed(io.RawIOBase):
    """The contents of a compressed file, as long as it expands no more than text does.

    Some of it is decompressed before anything is returned, so that little time is spent on a file that is not text.
    """

    def __init__(self, file: IO[bytes], decompress: Callable[[IO[bytes]], Any], name: str) -> None:
        self._file, self._stream, self._name = file, decompress(file), name
        self._first, self._size = io.BytesIO(), 0

    def readable(self) -> bool:
        return True

    def readinto(self, memory: Any) -> int:
        if not self._size:
            self._first = io.BytesIO(self._read(ALWAYS_ALLOWED + 1))
        data = self._first.read(len(memory)) or self._read(len(memory))
        memory[: len(data)] = data
        return len(data)

    def _read(self, size: int) -> bytes:
        data: bytes = self._stream.read(size)
        self._size += len(data)
        _check_ratio(self._file.tell(), self._size, self._name)
        return data


def _check_ratio(compressed: int, size: int, name: str) -> None:
    if size > max(ALWAYS_ALLOWED, MAX_RATIO * compressed):
        raise DataError(f"{name} is not text: it expands to more than {MAX_RATIO} times its size")


def _read(path: Path, kind: str, render: Render | None) -> Iterator[str]:
    reader = {".jsonl": _json_lines, ".parquet": _parquet}.get(kind, _plain)
    decompress = COMPRESSIONS.get(path.suffix)
    try:
        with open_regular(path, DataError) as file:
            if decompress is None:
                yield from reader(file, path, render)
            else:
                yield from reader(io.BufferedReader(Decompressed(file, decompress, quoted(path)), BLOCK), path, render)
    except UnicodeDecodeError as error:
        raise DataError(f"{quoted(path)} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"cannot read {quoted(path)}: {reason_of(error)}") from error


def _plain(file: IO[bytes], path: Path, render: Render | None) -> Iterator[str]:
    text = io.TextIOWrapper(file, encoding="utf-8-sig")  # turns every line end into LF
    while block := text.read(BLOCK):
        yield block


def _json_lines(file: IO[bytes], path: Path, render: Render | None) -> Iterator[str]:
    lines, limit = io.TextIOWrapper(file, encoding="utf-8-sig"), max_line_length()
    for number, line in enumerate(iter(lambda: lines.readline(limit + 1), ""), start=1):
        if len(line) > limit:
            raise too_long(f"{quoted(path)}, line {number},")
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise TypeError(type(row).__name__)
            text = row_text(row, render)
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            expected = "a JSON object with a 'text' or 'page' field, or with a chat in 'messages'"
            raise DataError(f"{quoted(path)}, line {number}: not {expected}") from error
        yield _clean(text, f"{quoted(path)}, line {number}")


def _parquet(file: IO[bytes], path: Path, render: Render | None) -> Iterator[str]:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    try:
        table = parquet.ParquetFile(file if path.suffix == ".parquet" else io.BytesIO(file.read()))
        column = text_column(table.schema_arrow.names)
        for group in range(table.metadata.num_row_groups):
            for number in range(table.metadata.num_columns):
                part = table.metadata.row_group(group).column(number)
                _check_ratio(part.total_compressed_size, part.total_uncompressed_size, quoted(path))
        for batch in table.iter_batches(batch_size=256, columns=[column]):
            for row in batch.column(0).to_pylist():
                text = row_text({column: row}, render)
                if len(text) > max_line_length():
                    raise too_long(quoted(path))
                yield _clean(text, quoted(path))
    except (arrow.ArrowException, LookupError) as error:
        expected = "a Parquet file with a column 'text' or 'page', or with chats in 'messages'"
        raise DataError(f"{quoted(path)}: not {expected}") from error


def _from_hub(name: str, render: Render | None) -> Iterator[str]:
    """Yield the rows of a hub dataset: NAME, NAME:CONFIG or NAME:CONFIG:SPLIT; the default split is train."""
    if not hub.is_reachable():
        raise DataError(f"no file {quoted(name)}, and the hub cannot be reached for a dataset of that name")
    from datasets import load_dataset

    repository, config, split = (*name.split(":", 2), "", "")[:3]
    try:
        for row in load_dataset(repository, config or None, split=split or "train", streaming=True):
            yield _clean(row_text(row, render), quoted(name))
    except DataError:
        raise
    except LookupError as error:
        raise DataError(f"the dataset {quoted(name)} has no column 'text' or 'page', and no 'messages'") from error
    except Exception as error:
        raise DataError(f"no file {quoted(name)}, and no dataset of that name: {reason_of(error)}") from error


def _in_memory(texts: Texts, render: Render | None) -> Iterator[str]:
    for number, row in enumerate(texts, start=1):
        try:
            text = row_text(row, render)
        except LookupError as error:
            expected = "a string, a chat, or a row with `text`, `page` or `messages`"
            raise DataError(f"text {number} of {texts} must be {expected}, got {quoted(repr(row))}") from error
        yield _clean(text, f"text {number} of {texts}")


def _clean(text: str, where: str) -> str:
    """Return text with LF as its line ends; refuse text that is not Unicode."""
    if not is_unicode(text):
        raise DataError(f"{where}: half of a surrogate pair, which is not Unicode")
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text
