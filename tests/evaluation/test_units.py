"""Perplexity per token, per word and bits per byte are one number in three units, by counts that are told."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch
from slimstate.evaluation.evaluate import EvalOptions

import slimstate
import tiny
from command import run
from places import ROOT
from slimstate.core.file_names import PLAN
from slimstate.evaluation.perplexity import LARGEST, TextSize, evaluation_windows, perplexity_of
from slimstate.models.load import load_tokenizer
from slimstate.records.schema import MAX_NUMBER
from slimstate.records.sweep import SweepRecord

NAME = tiny.PLAIN[0]
TOKENIZER = load_tokenizer(ROOT / "demo" / "model")
TEXT = "A state of 4 heads\tis small.\n\n Größe 状態 counts  in bytes .\n" * 20


def test_words_are_counted_as_lm_eval_counts_them_and_bytes_as_utf_8(tmp_path):
    """lm-eval's `wikitext` has len(re.split(r"\\s+", page)) words, and as many bytes as the page in UTF-8."""
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    for length in (7, 64):  # shorter than some characters have tokens
        windows = evaluation_windows(TOKENIZER, str(tmp_path / "text.txt"), length)
        found = TextSize.of(TOKENIZER, windows.tokens)
        text = TOKENIZER.decode(windows.tokens.flatten().tolist())
        assert TEXT.startswith(text.rstrip("\ufffd"))
        assert found == TextSize(
            tokens=windows.tokens.numel(), words=len(re.split(r"\s+", text)), bytes=len(text.encode())
        )


def test_an_end_of_text_token_parts_words_and_is_none():
    ids = [*TOKENIZER("one two")["input_ids"], TOKENIZER.eos_token_id, *TOKENIZER("three")["input_ids"]]
    found = TextSize.of(TOKENIZER, torch.tensor([ids]))
    assert found == TextSize(tokens=len(ids), words=3, bytes=len("one two\nthree"))


def test_windows_that_lie_apart_end_words():
    ids = torch.tensor([TOKENIZER("state")["input_ids"][:1]] * 3)
    assert TextSize.of(TOKENIZER, ids, apart=True).words == 3
    assert TextSize.of(TOKENIZER, ids).words == 1


def test_a_perplexity_that_no_record_holds_is_not_told():
    """Text without spaces is one word: its perplexity is beyond any float, and bits per byte say it all."""
    predicted = TextSize(tokens=1000, words=1, bytes=3000).predicted(5.0)
    assert predicted.word_perplexity is None
    assert predicted.bits_per_byte == pytest.approx(5 / 3 / math.log(2))
    assert perplexity_of(1e9) < MAX_NUMBER
    assert TextSize(tokens=1, words=1, bytes=1).predicted(LARGEST).word_perplexity < MAX_NUMBER


@pytest.mark.slow
def test_eval_tells_three_units_that_agree_by_the_counts_it_tells(folders, text_file, tmp_path, capsys, monkeypatch):
    words = ("eval", folders[NAME], "--text", text_file, "--length", "64", "--max-tokens", "512")
    code, out, _ = run(capsys, monkeypatch, *words, "--json")
    found = json.loads(out)
    assert code == 0
    total = found["nats_per_token"] * found["tokens"]
    assert found["perplexity"] == pytest.approx(math.exp(total / found["tokens"]), rel=1e-12)
    assert found["word_perplexity"] == pytest.approx(math.exp(total / found["words"]), rel=1e-12)
    assert found["bits_per_byte"] == pytest.approx(total / found["bytes"] / math.log(2), rel=1e-12)
    text = text_file.read_text()[:512]
    assert (found["tokens"], found["words"], found["bytes"]) == (512, len(re.split(r"\s+", text)), 512)
    _, out, _ = run(capsys, monkeypatch, *words)
    assert f"perplexity {found['perplexity']:.3f} per token, " in out
    assert f"{found['word_perplexity']:.3g} per word" in out
    assert f"512 tokens, {found['words']} words, 512 bytes" in out


@pytest.mark.slow
def test_sweep_prints_all_units_and_what_they_rest_on(folders, text_file, tmp_path, capsys, monkeypatch):
    code, out, err = run(
        capsys, monkeypatch, "sweep", folders[NAME], "--text", text_file, "--methods", "l1", "--key-dims", "13",
        "--keep-norm-eps", "--text-length", "64", "--max-tokens", "512", "--out", tmp_path / "out",
    )  # fmt: skip
    assert code == 0
    (row,) = SweepRecord.read(tmp_path / "out" / "sweep.json").rows
    assert (row.key_dim, row.compression) == (13, 1 - 13 / 24)
    for text in (out, err):
        assert f"{row.perplexity:.2f}" in text
        assert f"{row.word_perplexity:.3g}" in text
        assert f"{row.bits_per_byte:.4f}" in text
    assert "per token" in out
    assert "per word" in out
    assert f"measured on 512 tokens, {row.words} words, 512 bytes" in out
    assert "--key-dim 13" in out
    assert "--keep-norm-eps" in out


def test_key_dims_that_are_no_numbers_are_one_line(folders, text_file, tmp_path, capsys, monkeypatch):
    asked = ("sweep", folders[NAME], "--text", text_file, "--out", tmp_path / "out", "--key-dims", "89;76")
    code, _, err = run(capsys, monkeypatch, *asked)
    assert (code, err.strip().count("\n")) == (2, 0)
    assert "--key-dims 89;76: give numbers with commas" in err


@pytest.mark.parametrize("verb", ["prune", "sweep", "eval", "analyze", "recover", "train", "bench calibrate"])
def test_every_verb_that_reads_text_is_told_what_a_document_is(verb, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    _, out, _ = run(capsys, monkeypatch, *verb.split(), "--help")
    assert "--documents" in out


@pytest.mark.slow
def test_what_documents_are_reaches_the_text_and_the_record(folders, tmp_path, capsys, monkeypatch):
    """A line of text is a document, and an end-of-text token stands after each: fewer characters fit into windows."""
    text = tmp_path / "text.txt"
    text.write_text("a line of text\n" * 200)
    counted = {}
    for documents in ("file", "lines"):
        told = ("--text", text, "--length", "64", "--documents", documents, "--json")
        _, out, _ = run(capsys, monkeypatch, "eval", folders[NAME], *told)
        found = json.loads(out)
        assert found["documents"] == documents
        assert f"--documents {documents}" in found["command"]
        counted[documents] = found["tokens"]
        _, out, _ = run(
            capsys, monkeypatch, "prune", folders[NAME], "--key-dim", "16", "--data", text, "--documents", documents,
            "--samples", "4", "--length", "64", "--out", tmp_path / documents,
        )  # fmt: skip
        calibration = json.loads((tmp_path / documents / PLAN).read_text())["calibration"]
        assert calibration.get("documents", "file") == documents  # a plan says it where it is not what a text suggests
    assert counted["lines"] - counted["file"] == pytest.approx(200, abs=64)
    code, _, err = run(capsys, monkeypatch, "eval", folders[NAME], "--text", text, "--documents", "pages")
    assert code == 2
    assert "--documents pages: there are lines, blank, file, rows" in err


def test_a_crlf_copy_measures_the_same(folders, text_file, tmp_path):
    copy = tmp_path / "crlf.txt"
    copy.write_bytes(text_file.read_bytes().replace(b"\n", b"\r\n"))
    options = EvalOptions(length=64, max_tokens=512)
    one, other = (slimstate.evaluate(folders[NAME], text, options=options) for text in (text_file, copy))
    assert (one.digest, one.perplexity, one.words, one.bytes) == (
        other.digest,
        other.perplexity,
        other.words,
        other.bytes,
    )
