"""Where text lies: .txt, .jsonl and .parquet files, .xz or .gz of one, folders of them, `datasets` names.

Line ends are universal: CRLF and CR are read as LF, whatever the source.
"""

from __future__ import annotations

import gzip
import io
import json
import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from slimstate.system import hub
from slimstate.system.errors import DataError
from slimstate.system.paths import expanded

BLOCK = 2**18  # characters of plain text that are read at once
FORMATS = (".txt", ".jsonl", ".parquet")
COMPRESSIONS = {".xz": lzma.open, ".gz": gzip.open}


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file or a dataset. What it holds can be read once: blocks of one text, or, with `rows`, the text of each."""

    rows: bool
    texts: Iterator[str]


def sources(name: str) -> Iterator[Source]:
    """The file, the files of the folder in order, or the dataset of the hub."""
    path = expanded(name)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if _format(file) is not None)
        if not files:
            raise DataError(f"{name} holds no {', '.join(FORMATS)} file")
        yield from map(_source, files)
    elif path.is_file():
        yield _source(path)
    elif _format(path) is not None or name.startswith(("/", "./", "../", "~")):
        raise DataError(f"no data at {name}")
    else:
        yield Source(rows=True, texts=_from_hub(name))


def _format(path: Path) -> str | None:
    """The format that a file's name tells, compressed or not."""
    suffixes = [suffix for suffix in path.suffixes if suffix not in COMPRESSIONS]
    return suffixes[-1] if suffixes and suffixes[-1] in FORMATS else None


def _source(path: Path) -> Source:
    kind = _format(path)
    if kind is None:
        raise DataError(f"{path}: not one of {', '.join(FORMATS)}, or .xz or .gz of one")
    return Source(rows=kind != ".txt", texts=_read(path, kind))


def _read(path: Path, kind: str) -> Iterator[str]:
    reader = {".txt": _plain, ".jsonl": _json_lines, ".parquet": _parquet}[kind]
    opener = COMPRESSIONS.get(path.suffix, open)
    try:
        with opener(path, "rb") as file:  # type: ignore[operator]
            yield from reader(file, path)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise DataError(f"cannot read {path}: {error}") from error


def _plain(file: IO[bytes], path: Path) -> Iterator[str]:
    text = io.TextIOWrapper(file, encoding="utf-8")  # which makes every line end LF
    while block := text.read(BLOCK):
        yield block


def _json_lines(file: IO[bytes], path: Path) -> Iterator[str]:
    for number, line in enumerate(io.TextIOWrapper(file, encoding="utf-8"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}, line {number}: not a JSON object with a 'text' field") from error
        yield _unified(str(row))


def _parquet(file: IO[bytes], path: Path) -> Iterator[str]:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    try:
        table = parquet.ParquetFile(file if path.suffix == ".parquet" else io.BytesIO(file.read()))
        for batch in table.iter_batches(batch_size=256, columns=["text"]):
            yield from (_unified(str(row)) for row in batch.column(0).to_pylist())
    except (arrow.ArrowException, KeyError, IndexError) as error:
        raise DataError(f"{path}: not a Parquet file with a 'text' column") from error


def _from_hub(name: str) -> Iterator[str]:
    """A dataset streamed from the hub: NAME, NAME:CONFIG or NAME:CONFIG:SPLIT, by default train; its `text` field."""
    from datasets import load_dataset

    if not hub.reachable():
        raise DataError(f"no file {name}, and the hub cannot be reached from here for a dataset of that name")
    repository, config, split = (*name.split(":", 2), "", "")[:3]
    try:
        for row in load_dataset(repository, config or None, split=split or "train", streaming=True):
            yield _unified(str(row["text"]))
    except Exception as error:
        raise DataError(f"no file {name}, and no dataset of that name can be had: {hub.reason(error)}") from error


def _unified(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text
