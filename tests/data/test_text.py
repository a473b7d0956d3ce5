"""Every format gives the same tokens, the same seed the same windows, and what is wrong is said in one line."""

from __future__ import annotations

import gzip
import json
import lzma

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
import torch

import tiny
from slimstate.data.documents import PIECE, Reading
from slimstate.data.text import sample_windows, token_stream
from slimstate.evaluation.perplexity import evaluation_windows
from slimstate.system.errors import DataError

TOKENIZER = tiny.tokenizer()
DOCUMENTS = [tiny.text(3000, seed) for seed in range(4)]
END = TOKENIZER.eos_token_id


def stream(path) -> list[int]:
    return [token for part in token_stream(TOKENIZER, str(path)) for token in part]


def write(folder, name):
    lines = "\n".join(json.dumps({"text": document}) for document in DOCUMENTS).encode()
    if name.startswith("x.jsonl"):
        data = lines
    else:
        parquet.write_table(arrow.table({"text": DOCUMENTS}), folder / "table")
        data = (folder / "table").read_bytes()
        (folder / "table").unlink()
    packer = {".xz": lzma.compress, ".gz": gzip.compress}.get(name[-3:], bytes)
    (folder / name).write_bytes(packer(data))
    return folder / name


@pytest.mark.parametrize("packed", ["", ".xz", ".gz"])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_documents_are_the_same_in_every_format(kind, packed, tmp_path):
    expected = [token for document in DOCUMENTS for token in [*TOKENIZER(document)["input_ids"], END]]
    assert stream(write(tmp_path, f"x.{kind}{packed}")) == expected


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_row_without_text_is_empty_and_not_the_word_none(kind, tmp_path):
    found = []
    for missing in (None, ""):
        path, texts = tmp_path / f"with-{missing}.{kind}", ["a", missing, "b"]
        if kind == "jsonl":
            path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
        else:
            parquet.write_table(arrow.table({"text": texts}), path)
        found.append(stream(path))
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["x.txt", "x.txt.xz", "x.txt.gz"])
def test_plain_text_is_one_document_whatever_its_size(name, tmp_path):
    text = tiny.text(PIECE * 2 + 1000)
    packer = {".xz": lzma.compress, ".gz": gzip.compress}.get(name[-3:], bytes)
    (tmp_path / name).write_bytes(packer(text.encode()))
    assert stream(tmp_path / name) == [*TOKENIZER(text)["input_ids"], END]


def test_a_folder_is_its_files_in_order(tmp_path):
    for number, document in enumerate(DOCUMENTS):
        (tmp_path / f"{number}.txt").write_text(document)
    (tmp_path / "ignored.csv").write_text("a,b")
    assert stream(tmp_path) == [token for document in DOCUMENTS for token in [*TOKENIZER(document)["input_ids"], END]]


def test_windows_are_whole_distinct_and_decided_by_the_seed(text_file):
    first = sample_windows(TOKENIZER, str(text_file), samples=8, length=100, seed=1)
    again = sample_windows(TOKENIZER, str(text_file), samples=8, length=100, seed=1)
    other = sample_windows(TOKENIZER, str(text_file), samples=8, length=100, seed=2)
    assert first.tokens.shape == (8, 100)
    assert torch.equal(first.tokens, again.tokens)
    assert first.digest == again.digest != other.digest
    tokens = torch.tensor(stream(text_file))
    starts = {
        int(start)
        for window in first.tokens
        for start in range(0, len(tokens), 100)
        if torch.equal(tokens[start : start + 100], window)
    }
    assert len(starts) >= 8


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("short.txt", b"too short", "has 10 tokens; 8 samples of 100 need 800"),
        ("empty.txt", b"", "is empty"),
        ("blank.txt", b"  \n ", "is empty"),
        ("latin.txt", "caf\xe9".encode("latin-1") * 50, "is not UTF-8 text"),
        ("bad.jsonl", b'{"text": "a"}\nnot json\n', "line 2: not a JSON object with a 'text' field"),
        ("other.jsonl", b'{"body": "a"}\n', "line 1: not a JSON object with a 'text' field"),
        ("bad.parquet", b"not parquet", "not a Parquet file with a 'text' column"),
        ("bad.txt.gz", b"not gzip", "cannot read"),
        ("bad.txt.xz", b"not xz", "cannot read"),
        ("page.html", b"<html>", "not one of .txt"),
        (None, None, "no data at"),
    ],
)
def test_bad_data_is_named(name, content, message, tmp_path):
    path = tmp_path / (name or "missing.txt")
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        sample_windows(TOKENIZER, str(path), samples=8, length=100)


def test_evaluation_takes_whole_windows_of_the_first_tokens(text_file):
    tokens = torch.tensor(stream(text_file))
    found = evaluation_windows(TOKENIZER, str(text_file), 100, 950).tokens
    assert torch.equal(found.flatten(), tokens[:900])
    assert len(evaluation_windows(TOKENIZER, str(text_file), 100).tokens) == len(tokens) // 100
    assert evaluation_windows(TOKENIZER, str(text_file), 100, 30).tokens.shape == (1, 30)


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("owner/set", ("owner/set", None, "train")),
        ("owner/set:small", ("owner/set", "small", "train")),
        ("owner/set:small:test", ("owner/set", "small", "test")),
        ("owner/set::test", ("owner/set", None, "test")),
    ],
)
def test_a_dataset_is_named_with_its_config_and_its_split(name, asked, monkeypatch):
    import datasets

    seen = []

    def load_dataset(repository, config, *, split, streaming):
        assert streaming
        seen.append((repository, config, split))
        return [{"text": "one"}, {"text": "two"}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr("slimstate.data.sources.hub.reachable", lambda: True)
    assert [piece.text for piece in Reading(name).pieces()] == ["one", "two"]
    assert seen == [asked]
