"""Texts of strangers: damaged, endless or packed to bursting, each is one line and no wait."""

from __future__ import annotations

import gzip
import json
import lzma
import os

import pytest

import tiny
from slimstate.data.documents import DOCUMENTS, Reading
from slimstate.data.text import token_stream
from slimstate.system.errors import DataError

TEXT = "a line of text\n" * 1000


def read(path, documents=None) -> list[str]:
    return [piece.text for piece in Reading(str(path), documents).pieces()]


@pytest.mark.parametrize("at", [3, 40, 60, -3])
def test_a_damaged_gz_is_one_line(at, tmp_path):
    data = bytearray(gzip.compress(os.urandom(500).hex().encode()))
    data[at] ^= 0xFF
    (tmp_path / "x.txt.gz").write_bytes(data)
    with pytest.raises(DataError, match=r"cannot read|is not UTF-8"):
        read(tmp_path / "x.txt.gz")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": "a\\ud800b"}', "line 2: half of a surrogate pair"),
        ("[" * 100_000, "line 2: not a JSON object"),
        ('{"text"', "line 2: not a JSON object"),
        ("5", "line 2: not a JSON object"),
    ],
)
def test_a_row_that_is_no_text_is_named(line, words, tmp_path):
    (tmp_path / "x.jsonl").write_text(f"{json.dumps({'text': 'x'})}\n{line}\n")
    with pytest.raises(DataError, match=words):
        read(tmp_path / "x.jsonl")


def test_a_pipe_in_a_folder_of_texts_is_not_waited_for(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    os.mkfifo(tmp_path / "b.txt")
    with pytest.raises(DataError, match=r"b.txt: it is not a regular file"):
        read(tmp_path)
    (tmp_path / "b.txt").unlink()
    (tmp_path / "b.txt").symlink_to("/dev/zero")
    with pytest.raises(DataError, match=r"b.txt: it is not a regular file"):
        read(tmp_path)


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("name", ["x.txt", "x.jsonl"])
def test_a_line_without_an_end_is_refused_and_the_bound_can_be_raised(name, documents, tmp_path, monkeypatch):
    long = "y" * 3_000_000
    (tmp_path / name).write_text(long if name == "x.txt" else json.dumps({"text": long}))
    monkeypatch.setenv("SLIMSTATE_MAX_LINE_MB", "2")
    if documents != "rows" or name != "x.txt":
        with pytest.raises(DataError, match=r"a line of more than 2 MiB; .*`max_line_mb`"):
            read(tmp_path / name, documents)
    monkeypatch.setenv("SLIMSTATE_MAX_LINE_MB", "3")
    assert "".join(read(tmp_path / name, documents)).strip() == long
    monkeypatch.setenv("SLIMSTATE_MAX_LINE_MB", "much")
    with pytest.raises(DataError, match=r"SLIMSTATE_MAX_LINE_MB must be a number of MiB, got much"):
        read(tmp_path / name, documents)


def test_a_parquet_file_that_unpacks_to_far_more_is_refused(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({"text": ["y" * 2**20 + str(number) for number in range(16)]})
    parquet.write_table(table, tmp_path / "bomb.parquet", compression="zstd", use_dictionary=False)
    with pytest.raises(DataError, match=r"bomb.parquet is not text: it expands to more than 200 times its size"):
        read(tmp_path / "bomb.parquet", "rows")


def test_long_lines_take_time_in_proportion():
    """Pieces and lines are put together once, not once for every block: a count of characters, and no clock."""
    from slimstate.data import documents

    class Counting(str):
        joined = 0

        def __add__(self, other):  # the old readers added every block to all that came before
            Counting.joined += len(self) + len(other)
            return Counting(str(self) + other)

    blocks = [Counting("z" * documents.PIECE)] * 40
    assert sum(map(len, documents._lines(iter(blocks)))) == 40 * documents.PIECE
    assert sum(len(piece.text) for piece in documents._document_pieces(iter(blocks))) == 40 * documents.PIECE
    assert Counting.joined == 0


@pytest.mark.parametrize(
    ("name", "pack"), [("x.txt.xz", lzma.compress), ("x.txt.gz", gzip.compress), ("x.jsonl.xz", lzma.compress)]
)
def test_a_file_that_unpacks_to_no_text_is_refused(name, pack, tmp_path):
    (tmp_path / name).write_bytes(pack(b"\n" * 2**23))
    with pytest.raises(DataError, match=r"expands to more than 200 times its size"):
        read(tmp_path / name)
    (tmp_path / name).write_bytes(pack(TEXT.encode()) if "txt" in name else pack(json.dumps({"text": TEXT}).encode()))
    assert "".join(read(tmp_path / name)).strip() == TEXT.strip()


def test_a_tokenizer_that_fails_is_one_line(tmp_path):
    (tmp_path / "x.txt").write_text(TEXT)

    class Failing:
        eos_token_id = None

        def __call__(self, *_, **__):
            raise Exception("no such thing\nin two lines")

    with pytest.raises(DataError, match=r"the tokenizer of the model fails on the text: Exception: no such thing$"):
        list(token_stream(Failing(), str(tmp_path / "x.txt")))
    assert list(token_stream(tiny.tokenizer(), str(tmp_path / "x.txt")))
