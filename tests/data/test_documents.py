"""Documents and tokens of a text are the same in every format, with any line ends, as a file or as rows of a table."""

import gzip
import json
import lzma
from itertools import chain
from pathlib import Path

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

import tiny
from places import ROOT
from slimstate.data import documents as module
from slimstate.data.corpus import Corpus
from slimstate.data.documents import PIECE, Piece, Reading
from slimstate.data.options import DocumentOptions
from slimstate.data.rows import Texts
from slimstate.data.sources import is_same_text
from slimstate.data.text import sample_windows, token_stream
from slimstate.evaluation.perplexity import evaluation_windows
from slimstate.models.load import load_tokenizer
from slimstate.pruning.evidence import calibration_windows
from slimstate.pruning.options import Calibration
from slimstate.system.errors import DataError, PlanError

TOKENIZER = load_tokenizer(ROOT / "demo" / "model")  # tokens of several characters, so that a divided word shows
LETTERS = tiny.tokenizer()  # a token per character
END = TOKENIZER.eos_token_id
WIKI = " = Valkyria = \n\n Senjō no Valkyria is a game .\n It was made by Sega .\n\n\n = = Story = = \n\n A war .\n"
COMPRESSIONS = {"": bytes, ".xz": lzma.compress, ".gz": gzip.compress}
every_compression = pytest.mark.parametrize("compression", COMPRESSIONS)
every_table = pytest.mark.parametrize("kind", ["jsonl", "parquet"])
LINES = st.lists(st.text(st.sampled_from("ab =.\té "), max_size=9), min_size=1, max_size=30)
DIVISIONS = [("lines", ["a b\n", "c\n", "d\n"]), ("blank", ["a b\nc\n", "d\n"]), ("file", ["\na b\nc\n \n\nd\n"])]
REQUESTS = [
    ("owner/set", ("owner/set", None, "train")),
    ("owner/set:small", ("owner/set", "small", "train")),
    ("owner/set:small:test", ("owner/set", "small", "test")),
    ("owner/set::test", ("owner/set", None, "test")),
]
DIGESTS = [
    ("x.txt", "3e72d826f73772f8c6392ffbded5428fc2d3619311d8115cbcaeb9b19118de81",
     "5638a5d7bd3aa6ddf5efdd2772ece0a23824328d0066a1608cdba3bad6423cee"),
    ("x.jsonl", "a977234e6a9e5a282bff4ffa919c98392276e485d95a37df5f06fab1cb556572",
     "442fe7f9887e5f56f714bcfe6a58cfba7e667bacb96dd3855fcd9d5a9da5987c"),
    ("x.parquet", "a977234e6a9e5a282bff4ffa919c98392276e485d95a37df5f06fab1cb556572",
     "442fe7f9887e5f56f714bcfe6a58cfba7e667bacb96dd3855fcd9d5a9da5987c"),
]  # fmt: skip
TEMPLATES = [("<|end|> $A", 1, 0), ("<|end|> $A <|end|>", 1, 1), ("$A", 0, 0)]


def flatten(stream) -> list[int]:
    return [token for part in stream for token in part]


def tokens_in(path: Path | str, documents: str | None = None) -> list[int]:
    return flatten(token_stream(TOKENIZER, Reading(str(path), documents)))


def tokens_of(*texts: str) -> list[int]:
    return [token for text in texts for token in [*TOKENIZER(text)["input_ids"], END]]


def write(path: Path, content: str | list[str | None]) -> Path:
    """Write a text, or the rows of a table, in the format and the compression of the file's name."""
    if isinstance(content, str):
        data = content.encode()
    elif ".parquet" in path.suffixes:
        sink = arrow.BufferOutputStream()
        parquet.write_table(arrow.table({"text": content}), sink)
        data = sink.getvalue().to_pybytes()
    else:
        data = "".join(json.dumps({"text": row}) + "\n" for row in content).encode()
    path.write_bytes(COMPRESSIONS.get(path.suffix, bytes)(data))
    return path


def rows_of_wikitext(text: str) -> list[str]:
    """Return a row for each line, as on the hub: with its line end, and blank lines empty."""
    return [f"{line}\n" if line.strip() else "" for line in text.split("\n")[:-1]]


@every_compression
@pytest.mark.parametrize("end", ["\r\n", "\r"])
def test_line_ends_and_formats_make_no_difference(end, compression, tmp_path):
    text = WIKI * 40
    plain = write(tmp_path / "lf.txt", text)
    other = write(tmp_path / f"x.txt{compression}", text.replace("\n", end))
    first, second = (sample_windows(TOKENIZER, str(path), samples=4, length=64) for path in (plain, other))
    assert first.digest == second.digest
    assert evaluation_windows(TOKENIZER, str(other), 64).digest == evaluation_windows(TOKENIZER, str(plain), 64).digest
    for kind in ("jsonl", "parquet"):
        rows = write(tmp_path / f"x.{kind}{compression}", [text.replace("\n", end), "one\ntwo".replace("\n", end)])
        assert tokens_in(rows) == tokens_of(text, "one\ntwo")


def test_a_carriage_return_at_the_end_of_a_block_is_one_line_end(tmp_path, monkeypatch):
    monkeypatch.setattr("slimstate.data.sources.BLOCK", 1)
    path = write(tmp_path / "x.txt", "a\r\nb\r\rc\r\n")
    assert "".join(piece.text for piece in Reading(str(path)).pieces()) == "a\nb\n\nc\n"


@pytest.mark.slow
@every_compression
def test_plain_text_is_one_document_of_any_size(compression, tmp_path):
    text = tiny.text(PIECE * 2 + 1000)
    path = write(tmp_path / f"x.txt{compression}", text)
    assert flatten(token_stream(LETTERS, str(path))) == [*LETTERS(text)["input_ids"], LETTERS.eos_token_id]


@every_compression
@every_table
@pytest.mark.parametrize(
    ("rows", "documents"),
    [
        (rows_of_wikitext(WIKI), None),
        (rows_of_wikitext(WIKI), "file"),
        ([row.replace("\n", "\r\n") for row in rows_of_wikitext(WIKI)], None),
        (WIKI.split("\n")[:-1], "file"),
        (WIKI.splitlines(keepends=True), None),
    ],
)
def test_wikitext_as_rows_and_as_one_file_gives_the_same_tokens(rows, documents, kind, compression, tmp_path):
    reading = Reading(str(write(tmp_path / f"x.{kind}{compression}", rows)), documents)
    tokens = flatten(token_stream(TOKENIZER, reading))
    assert tokens == tokens_in(write(tmp_path / "x.txt", WIKI)) == tokens_of(WIKI)
    assert reading.documents == "file"


@settings(max_examples=60, deadline=None)
@given(lines=LINES, piece=st.integers(1, 40), ended=st.booleans())
def test_pieces_of_rows_end_where_those_of_the_file_end(lines, piece, ended, tmp_path_factory):
    """Pieces are tokenised by themselves, so that their ends are part of the result."""
    folder = tmp_path_factory.mktemp("rows")
    path = write(folder / "x.txt", "".join(f"{line}\n" for line in lines))
    rows = write(folder / "x.jsonl", [f"{line}\n" if ended else line for line in lines])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE", piece)
        for documents in ("file", "lines", "blank"):
            one, other = (list(Reading(str(source), documents).pieces()) for source in (path, rows))
            assert one == other


@settings(max_examples=60, deadline=None)
@given(text=st.text(st.sampled_from("ab \n"), max_size=80), size=st.integers(1, 90))
def test_pieces_do_not_depend_on_the_size_of_blocks(text, size):
    rest, expected = "", []
    for start in range(0, len(text), 7):  # as a file is read: 7 characters at once, divided at the last line end
        rest += text[start : start + 7]
        end = rest.rfind("\n") + 1
        if end:
            expected.append(Piece(text=rest[:end], ends=False))
        rest = rest[end:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE", 7)
        blocks = [text[start : start + size] for start in range(0, len(text), size)]
        assert list(module._document_pieces(blocks)) == [*expected, Piece(text=rest, ends=True)]


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
@pytest.mark.parametrize(("documents", "expected"), DIVISIONS)
def test_text_is_divided_into_documents_as_requested(documents, expected, kind, tmp_path):
    """Blank lines belong to no document unless everything is one."""
    content = "\na b\nc\n \n\nd\n" if kind == "txt" else ["\na b\nc", " \n", "", "d"]
    assert tokens_in(write(tmp_path / f"x.{kind}", content), documents) == tokens_of(*expected)


def test_a_row_is_a_document_unless_rows_are_lines(tmp_path):
    """One row with a line end inside, or without one at its end, is enough."""
    for rows in (["a\n", "b\nc\n"], ["a\n", "b"], ["", ""], [" ", "a\n"]):
        pieces = list(Reading(str(write(tmp_path / "x.jsonl", rows))).pieces())
        assert pieces == [Piece(text=row, ends=True) for row in rows]
    lines = write(tmp_path / "x.jsonl", ["a\n", "b\n"])
    assert tokens_in(lines, "rows") == tokens_of("a\n", "b\n")
    assert tokens_in(lines) == tokens_of("a\nb\n")
    assert tokens_in(write(tmp_path / "x.jsonl", [""] * 99 + ["a\n"])) == tokens_of("\n" * 99 + "a\n")
    assert tokens_in(write(tmp_path / "x.txt", "a\nb\n"), "rows") == tokens_of("a\nb\n")


@every_table
def test_a_row_without_text_is_empty_and_not_the_word_none(kind, tmp_path):
    first, second = (write(tmp_path / f"x{missing}.{kind}", ["a", missing, "b"]) for missing in (None, ""))
    assert tokens_in(first) == tokens_in(second)


def test_rows_are_read_no_further_than_needed(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "a document"}\nnot json\n')
    assert next(Reading(str(tmp_path / "x.jsonl")).pieces()) == Piece(text="a document", ends=True)


def test_a_folder_is_its_files_in_order_each_divided_by_itself(tmp_path):
    write(tmp_path / "a.jsonl", ["one", "two"])
    write(tmp_path / "b.jsonl", ["three\n", "four\n"])
    write(tmp_path / "c.txt", "five\n")
    (tmp_path / "ignored.csv").write_text("a,b")
    reading = Reading(str(tmp_path))
    assert flatten(token_stream(TOKENIZER, reading)) == tokens_of("one", "two", "three\nfour\n", "five\n")
    assert reading.documents == "rows, file"


@pytest.mark.parametrize(("name", "request_"), REQUESTS)
def test_a_dataset_has_a_config_and_a_split_and_its_lines_are_one_text(name, request_, monkeypatch):
    import datasets

    requests = []

    def load_dataset(repository, config, *, split, streaming):
        assert streaming
        requests.append((repository, config, split))
        return [{"text": row} for row in rows_of_wikitext(WIKI)]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr("slimstate.data.sources.hub.is_reachable", lambda: True)
    assert tokens_in(name) == tokens_of(WIKI)
    assert requests == [request_]
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: [{"words": "a"}])
    with pytest.raises(DataError, match="has no column 'text' or 'page'"):
        tokens_in(name)


def test_a_text_is_recognised_by_any_of_its_names(tmp_path):
    text, items = write(tmp_path / "x.txt", ["text"]), ["text"]
    (tmp_path / "link.txt").symlink_to(text)
    assert is_same_text(str(text), str(tmp_path / "link.txt"))
    assert is_same_text(Texts(items), Texts(items))
    assert not is_same_text(Texts(items), Texts(["text"]))
    assert not is_same_text(str(text), Texts(items))


def test_windows_and_corpora_record_how_documents_were_divided(tmp_path):
    """Plans and evidence record it only where it is not the usual, so that their bytes stay the same."""
    rows = write(tmp_path / "x.jsonl", ["some text of a document"] * 40)
    for documents, expected in ((None, "rows"), ("file", "file")):
        calibration = Calibration(data=str(rows), documents=documents, samples=2, length=16)
        windows = calibration_windows(calibration, TOKENIZER)
        assert windows.describe()["documents"] == expected
        usual = {"special_tokens", *(["documents"] if documents is None else [])}
        described = {name: value for name, value in windows.describe().items() if name not in usual}
        assert windows.provenance() == described
        assert evaluation_windows(TOKENIZER, Reading(str(rows), documents), 16).documents == expected
        corpus = Corpus.collect(TOKENIZER, Reading(str(rows), documents), 16, 3, 1, tmp_path)
        assert corpus.describe()["documents"] == expected
        assert Corpus.open(tmp_path) == corpus
    with pytest.raises(PlanError, match="unknown `documents` pages; there are lines, blank, file, rows"):
        DocumentOptions(documents="pages")


@pytest.mark.parametrize(("name", "drawn", "all_windows"), DIGESTS)
def test_the_tokens_of_a_text_stay_the_same_from_version_to_version(name, drawn, all_windows, tmp_path):
    """Published plans and evidence name the digests of their tokens."""
    rows = [tiny.text(3000, seed) for seed in range(4)]
    path = write(tmp_path / name, tiny.text(600_000) if name == "x.txt" else rows)
    assert sample_windows(TOKENIZER, str(path), samples=8, length=100, seed=1).digest == f"sha256:{drawn}"
    assert evaluation_windows(TOKENIZER, str(path), 128).digest == f"sha256:{all_windows}"


def test_windows_are_full_distinct_and_drawn_by_the_seed(text_file):
    first, again, other = (sample_windows(LETTERS, str(text_file), samples=8, length=100, seed=n) for n in (1, 1, 2))
    assert first.tokens.shape == (8, 100)
    assert torch.equal(first.tokens, again.tokens)
    assert first.digest == again.digest != other.digest
    tokens = torch.tensor(flatten(token_stream(LETTERS, str(text_file))))
    windows = {tuple(window.tolist()): start for start, window in enumerate(tokens.split(100))}
    assert len({windows[tuple(window.tolist())] for window in first.tokens}) == 8


def test_evaluation_uses_full_windows_of_the_first_tokens(text_file):
    tokens = torch.tensor(flatten(token_stream(LETTERS, str(text_file))))
    assert torch.equal(evaluation_windows(LETTERS, str(text_file), 100, 950).tokens.flatten(), tokens[:900])
    assert len(evaluation_windows(LETTERS, str(text_file), 100).tokens) == len(tokens) // 100
    assert evaluation_windows(LETTERS, str(text_file), 100, 30).tokens.shape == (1, 30)


@pytest.mark.slow
@pytest.mark.parametrize(("template", "before", "after"), TEMPLATES)
def test_special_tokens_may_be_those_of_the_tokenizer(template, before, after):
    """Once for a document, although a long one is tokenised in pieces."""
    tokenizer, texts = tiny.tokenizer(), Texts(["one", "two\n" * (PIECE // 3)])
    end = tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=[("<|end|>", end)])
    expected = []
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        expected += [end] * before + ids + [end] * after
    reading = DocumentOptions(special_tokens="tokenizer").reading(texts)
    assert list(chain.from_iterable(token_stream(tokenizer, reading))) == expected
