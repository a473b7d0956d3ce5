"""The same text gives the same tokens, however its lines end and whether it lies as one file or as rows of a table."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from places import ROOT
from slimstate.data import documents as told
from slimstate.data.corpus import Corpus
from slimstate.data.documents import Piece, Reading
from slimstate.data.text import sample_windows, token_stream
from slimstate.evaluation.perplexity import evaluation_windows
from slimstate.models.load import load_tokenizer
from slimstate.pruning.evidence import calibration_windows
from slimstate.pruning.options import Calibration
from slimstate.system.errors import DataError

TOKENIZER = load_tokenizer(ROOT / "demo" / "model")  # tokens of several characters, so that what is torn shows
END = TOKENIZER.eos_token_id
WIKI = " = Valkyria = \n\n Senjō no Valkyria is a game .\n It was made by Sega .\n\n\n = = Story = = \n\n A war .\n"
PACKERS = {"": bytes, ".xz": lzma.compress, ".gz": gzip.compress}


def stream(path: Path | str, documents: str | None = None) -> list[int]:
    return [token for part in token_stream(TOKENIZER, Reading(str(path), documents)) for token in part]


def tokens_of(*texts: str) -> list[int]:
    return [token for text in texts for token in [*TOKENIZER(text)["input_ids"], END]]


def write_rows(path: Path, rows: list[str]) -> Path:
    if path.name.startswith("x.parquet"):
        sink = arrow.BufferOutputStream()
        parquet.write_table(arrow.table({"text": rows}), sink)
        data = sink.getvalue().to_pybytes()
    else:
        data = "".join(json.dumps({"text": row}) + "\n" for row in rows).encode()
    packer = PACKERS[path.suffix if path.suffix in PACKERS else ""]
    path.write_bytes(packer(data))
    return path


def write_text(path: Path, text: str) -> Path:
    path.write_bytes(PACKERS[path.suffix if path.suffix in PACKERS else ""](text.encode()))
    return path


def as_on_the_hub(text: str) -> list[str]:
    """A row a line, as WikiText there: with its line end, and blank lines empty."""
    return [f"{line}\n" if line.strip() else "" for line in text.split("\n")[:-1]]


@pytest.mark.parametrize("packed", PACKERS)
@pytest.mark.parametrize("end", ["\r\n", "\r"])
def test_line_ends_are_universal_in_every_format(end, packed, tmp_path):
    text = WIKI * 40
    plain = write_text(tmp_path / "lf.txt", text)
    other = write_text(tmp_path / f"x.txt{packed}", text.replace("\n", end))
    first, second = (sample_windows(TOKENIZER, str(path), samples=4, length=64) for path in (plain, other))
    assert first.digest == second.digest
    assert evaluation_windows(TOKENIZER, str(other), 64).digest == evaluation_windows(TOKENIZER, str(plain), 64).digest
    for kind in ("jsonl", "parquet"):
        rows = write_rows(tmp_path / f"x.{kind}{packed}", [text.replace("\n", end), "one\ntwo".replace("\n", end)])
        assert stream(rows) == tokens_of(text, "one\ntwo")


def test_a_carriage_return_at_the_end_of_a_block_is_one_line_end(tmp_path, monkeypatch):
    monkeypatch.setattr("slimstate.data.sources.BLOCK", 1)
    path = write_text(tmp_path / "x.txt", "a\r\nb\r\rc\r\n")
    assert "".join(piece.text for piece in Reading(str(path)).pieces()) == "a\nb\n\nc\n"


@pytest.mark.parametrize("packed", PACKERS)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("rows", "documents"),
    [
        (as_on_the_hub(WIKI), None),
        (as_on_the_hub(WIKI), "file"),
        ([row.replace("\n", "\r\n") for row in as_on_the_hub(WIKI)], None),
        (WIKI.split("\n")[:-1], "file"),
        (WIKI.splitlines(keepends=True), None),
    ],
)
def test_wikitext_as_rows_and_as_one_file_gives_the_same_tokens(rows, documents, kind, packed, tmp_path):
    path = write_rows(tmp_path / f"x.{kind}{packed}", rows)
    reading = Reading(str(path), documents)
    found = [token for part in token_stream(TOKENIZER, reading) for token in part]
    assert found == stream(write_text(tmp_path / "x.txt", WIKI)) == tokens_of(WIKI)
    assert found.count(END) == 1
    assert reading.documents == "file"


LINES = st.lists(st.text(st.sampled_from("ab =.\té "), max_size=9), min_size=1, max_size=30)


@settings(max_examples=60, deadline=None)
@given(lines=LINES, piece=st.integers(1, 40), ended=st.booleans())
def test_where_pieces_end_depends_on_the_text_alone(lines, piece, ended, tmp_path_factory):
    """Pieces are tokenised by themselves: rows that are joined must be torn where the file is."""
    folder = tmp_path_factory.mktemp("rows")
    path = write_text(folder / "x.txt", "".join(f"{line}\n" for line in lines))
    rows = write_rows(folder / "x.jsonl", [f"{line}\n" if ended else line for line in lines])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(told, "PIECE", piece)
        for documents in ("file", "lines", "blank"):
            one, other = (list(Reading(str(source), documents).pieces()) for source in (path, rows))
            assert one == other


@settings(max_examples=60, deadline=None)
@given(text=st.text(st.sampled_from("ab \n"), max_size=80), size=st.integers(1, 90))
def test_the_same_pieces_come_of_blocks_of_any_size(text, size):
    def naive(piece: int) -> list[Piece]:
        """As a file is read: so many characters at once, cut at the last line end."""
        held, found = "", []
        for start in range(0, len(text), piece):
            held += text[start : start + piece]
            cut = held.rfind("\n") + 1
            if cut:
                found.append(Piece(text=held[:cut], ends=False))
            held = held[cut:]
        return [*found, Piece(text=held, ends=True)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(told, "PIECE", 7)
        blocks = [text[start : start + size] for start in range(0, len(text), size)]
        assert list(told._document_pieces(blocks)) == naive(7)


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
@pytest.mark.parametrize(
    ("documents", "expected"),
    [
        ("lines", ["a b\n", "c\n", "d\n"]),
        ("blank", ["a b\nc\n", "d\n"]),
        ("file", ["\na b\nc\n \n\nd\n"]),
    ],
)
def test_documents_are_told_apart_as_asked(documents, expected, kind, tmp_path):
    """Blank lines belong to no document unless the whole is one."""
    text = "\na b\nc\n \n\nd\n"
    path = tmp_path / f"x.{kind}"
    path = write_text(path, text) if kind == "txt" else write_rows(path, ["\na b\nc", " \n", "", "d"])
    assert stream(path, documents) == tokens_of(*expected)


def test_a_row_is_a_document_unless_rows_are_lines(tmp_path):
    """One row with a line end inside, or without one at its end, and they are documents."""
    for rows in (["a\n", "b\nc\n"], ["a\n", "b"], ["", ""], [" ", "a\n"]):
        found = list(Reading(str(write_rows(tmp_path / "x.jsonl", rows))).pieces())
        assert [piece.text for piece in found] == rows
        assert all(piece.ends for piece in found)
    lines = write_rows(tmp_path / "x.jsonl", ["a\n", "b\n"])
    assert stream(lines, "rows") == tokens_of("a\n", "b\n")
    assert stream(lines) == tokens_of("a\nb\n")
    assert stream(write_text(tmp_path / "x.txt", "a\nb\n"), "rows") == tokens_of("a\nb\n")


def test_rows_are_looked_at_no_further_than_needed(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a document"}\nnot json\n')
    assert next(Reading(str(path)).pieces()) == Piece(text="a document", ends=True)


def test_every_file_of_a_folder_is_told_apart_by_itself(tmp_path):
    write_rows(tmp_path / "a.jsonl", ["one", "two"])
    write_rows(tmp_path / "b.jsonl", ["three\n", "four\n"])
    write_text(tmp_path / "c.txt", "five\n")
    reading = Reading(str(tmp_path))
    assert [token for part in token_stream(TOKENIZER, reading) for token in part] == tokens_of(
        "one", "two", "three\nfour\n", "five\n"
    )
    assert reading.documents == "rows, file"


def test_a_dataset_of_the_hub_with_a_line_in_each_row_is_one_text(monkeypatch):
    import datasets

    rows = [{"text": row} for row in as_on_the_hub(WIKI)]
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, **options: rows)
    monkeypatch.setattr("slimstate.data.sources.hub.reachable", lambda: True)
    assert stream("owner/wikitext") == tokens_of(WIKI)


def test_records_say_how_documents_were_told_apart(tmp_path):
    rows = write_rows(tmp_path / "x.jsonl", ["some text of a document"] * 40)
    for documents in (None, "file"):
        expected = documents or "rows"
        calibration = Calibration(data=str(rows), documents=documents, samples=2, length=16)
        assert calibration_windows(calibration, TOKENIZER).describe()["documents"] == expected
        assert evaluation_windows(TOKENIZER, Reading(str(rows), documents), 16).documents == expected
        corpus = Corpus.collect(TOKENIZER, Reading(str(rows), documents), 16, 3, 1, tmp_path)
        assert corpus.describe()["documents"] == expected
        assert Corpus.open(tmp_path) == corpus


def test_an_unknown_way_to_tell_documents_apart_is_refused(tmp_path):
    with pytest.raises(DataError, match="unknown `documents` pages; there are lines, blank, file, rows"):
        Reading("text.txt", "pages")


@pytest.mark.parametrize(
    ("name", "drawn", "whole"),
    [
        ("x.txt", "3e72d826f73772f8c6392ffbded5428fc2d3619311d8115cbcaeb9b19118de81",
         "5638a5d7bd3aa6ddf5efdd2772ece0a23824328d0066a1608cdba3bad6423cee"),
        ("x.jsonl", "a977234e6a9e5a282bff4ffa919c98392276e485d95a37df5f06fab1cb556572",
         "442fe7f9887e5f56f714bcfe6a58cfba7e667bacb96dd3855fcd9d5a9da5987c"),
        ("x.parquet", "a977234e6a9e5a282bff4ffa919c98392276e485d95a37df5f06fab1cb556572",
         "442fe7f9887e5f56f714bcfe6a58cfba7e667bacb96dd3855fcd9d5a9da5987c"),
    ],
)  # fmt: skip
def test_the_tokens_of_a_text_stay_the_same_from_version_to_version(name, drawn, whole, tmp_path):
    """Published plans and evidence name the digests of their tokens."""
    path = tmp_path / name
    if name == "x.txt":
        write_text(path, tiny.text(600_000))
    else:
        write_rows(path, [tiny.text(3000, seed) for seed in range(4)])
    assert sample_windows(TOKENIZER, str(path), samples=8, length=100, seed=1).digest == f"sha256:{drawn}"
    assert evaluation_windows(TOKENIZER, str(path), 128).digest == f"sha256:{whole}"


def test_plans_and_evidence_say_how_documents_were_told_apart_only_where_it_is_unusual(tmp_path):
    """So that a cut of today on a text of yesterday is the same to the byte."""
    text = tmp_path / "text.txt"
    text.write_text("a line of text\n" * 200)
    usual = sample_windows(TOKENIZER, str(text), samples=2, length=16)
    assert list(usual.provenance()) == ["data", "samples", "length", "seed", "digest"]
    lines = sample_windows(TOKENIZER, Reading(str(text), "lines"), samples=2, length=16)
    assert lines.provenance() == lines.describe()
    assert lines.provenance()["documents"] == "lines"
