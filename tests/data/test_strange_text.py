"""Untrusted texts: damaged, endless or compressed too far, each gives an error in one line, and soon."""

import gzip
import json
import lzma
import os

import pyarrow
import pytest
from pyarrow import parquet

import tiny
from slimstate.data import documents as module
from slimstate.data.documents import Reading
from slimstate.data.text import sample_windows, token_stream
from slimstate.system.errors import DataError

TEXT = "a line of text\n" * 1000
FIRST = json.dumps({"text": "x"})
PACKED = [("x.txt.xz", lzma.compress), ("x.txt.gz", gzip.compress), ("x.jsonl.xz", lzma.compress)]


def read(path, documents=None) -> list[str]:
    return [piece.text for piece in Reading(str(path), documents).pieces()]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("short.txt", b"too short", "has 10 tokens; 8 samples of 100 need 800"),
        ("empty.txt", b"", "is empty"),
        ("blank.txt", b"  \n ", "is empty"),
        ("latin.txt", "caf\xe9".encode("latin-1") * 50, "is not UTF-8 text"),
        ("bad.jsonl", f"{FIRST}\nnot json\n", "line 2: not a JSON object with a 'text' or 'page' field"),
        ("other.jsonl", '{"body": "a"}\n', "line 1: not a JSON object with a 'text' or 'page' field"),
        ("half.jsonl", f'{FIRST}\n{{"text": "a\\ud800b"}}\n', "line 2: half of a surrogate pair"),
        ("deep.jsonl", f"{FIRST}\n{'[' * 100_000}\n", "line 2: not a JSON object"),
        ("cut.jsonl", f'{FIRST}\n{{"text"\n', "line 2: not a JSON object"),
        ("number.jsonl", f"{FIRST}\n5\n", "line 2: not a JSON object"),
        ("bad.parquet", b"not parquet", "not a Parquet file with a column 'text' or 'page'"),
        ("bad.txt.gz", b"not gzip", "cannot read"),
        ("bad.txt.xz", b"not xz", "cannot read"),
        ("page.html", b"<html>", "not one of .txt"),
        ("missing.txt", None, "no data at"),
    ],
)
def test_bad_data_is_named(name, content, message, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(DataError, match=message):
        sample_windows(tiny.tokenizer(), str(tmp_path / name), samples=8, length=100)


@pytest.mark.parametrize("at", [3, 40, 60, -3])
def test_a_damaged_gz_is_one_line(at, tmp_path):
    data = bytearray(gzip.compress(os.urandom(500).hex().encode()))
    data[at] ^= 0xFF
    (tmp_path / "x.txt.gz").write_bytes(data)
    with pytest.raises(DataError, match=r"cannot read|is not UTF-8"):
        read(tmp_path / "x.txt.gz")


def test_a_pipe_in_a_folder_of_texts_is_not_waited_for(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    for special in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        special(tmp_path / "b.txt")
        with pytest.raises(DataError, match=r"b.txt: it is not a regular file"):
            read(tmp_path)
        (tmp_path / "b.txt").unlink()


@pytest.mark.parametrize("documents", ["lines", "blank", "file", "rows"])
@pytest.mark.parametrize("name", ["x.txt", "x.jsonl"])
def test_a_line_without_an_end_is_refused_and_the_limit_can_be_raised(name, documents, tmp_path, monkeypatch):
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


def test_a_parquet_file_that_expands_too_far_is_refused(tmp_path):
    table = pyarrow.table({"text": ["y" * 2**20 + str(number) for number in range(16)]})
    parquet.write_table(table, tmp_path / "bomb.parquet", compression="zstd", use_dictionary=False)
    with pytest.raises(DataError, match=r"bomb.parquet is not text: it expands to more than 200 times its size"):
        read(tmp_path / "bomb.parquet", "rows")


@pytest.mark.parametrize(("name", "pack"), PACKED)
def test_a_compressed_file_that_expands_too_far_is_refused(name, pack, tmp_path):
    (tmp_path / name).write_bytes(pack(b"\n" * 2**23))
    with pytest.raises(DataError, match=r"expands to more than 200 times its size"):
        read(tmp_path / name)
    (tmp_path / name).write_bytes(pack(TEXT.encode()) if "txt" in name else pack(json.dumps({"text": TEXT}).encode()))
    assert "".join(read(tmp_path / name)).strip() == TEXT.strip()


def test_the_time_for_long_lines_is_linear():
    """Blocks are joined once, and not each with all before it: counted in characters, not by a clock."""

    class Counting(str):
        joined = 0

        def __add__(self, other):
            Counting.joined += len(self) + len(other)
            return Counting(str(self) + other)

    blocks = [Counting("z" * module.PIECE)] * 40
    assert sum(map(len, module._lines(iter(blocks)))) == 40 * module.PIECE
    assert sum(len(piece.text) for piece in module._document_pieces(iter(blocks))) == 40 * module.PIECE
    assert Counting.joined == 0


def test_a_tokenizer_that_fails_is_one_line(tmp_path):
    (tmp_path / "x.txt").write_text(TEXT)

    class Failing:
        eos_token_id = None

        def __call__(self, *_, **__):
            raise Exception("no such thing\nin two lines")

    with pytest.raises(DataError, match=r"the tokenizer of the model fails on the text: Exception: no such thing$"):
        list(token_stream(Failing(), str(tmp_path / "x.txt")))
