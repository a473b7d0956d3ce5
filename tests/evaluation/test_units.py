"""Perplexity per token and bits per byte are one number in two units, by counts that are reported."""

import json
import math
import statistics

import pytest
import torch

import slimstate
import tiny
from places import ROOT
from slimstate.core.file_names import PLAN
from slimstate.evaluation.measure import compare
from slimstate.evaluation.perplexity import TextSize, evaluation_windows, perplexity_of, share_error, standard_error
from slimstate.models.load import load_tokenizer
from slimstate.records.evaluation import Result, SweepRecord
from slimstate.records.numbers import signed
from slimstate.records.schema import MAX_NUMBER

NAME = tiny.PLAIN[0]
TOKENIZER = load_tokenizer(ROOT / "demo" / "model")
TEXT = "A state of 4 heads\tis small.\n\n Größe 状態 counts  in bytes .\n" * 20


def test_bytes_are_those_of_utf_8_and_end_of_text_is_a_line_end(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    for length in (7, 64):  # shorter than some characters have tokens
        tokens = evaluation_windows(TOKENIZER, str(tmp_path / "text.txt"), length).tokens
        text = TOKENIZER.decode(tokens.flatten().tolist())
        assert TEXT.startswith(text.rstrip("\ufffd"))
        assert TextSize.of(TOKENIZER, tokens) == TextSize(tokens=tokens.numel(), bytes=len(text.encode()))
    ids = [*TOKENIZER("one two")["input_ids"], TOKENIZER.eos_token_id, *TOKENIZER("three")["input_ids"]]
    assert TextSize.of(TOKENIZER, torch.tensor([ids])).bytes == len("one two\nthree")
    assert TextSize(tokens=1000, bytes=3000).scores(5.0).bits_per_byte == pytest.approx(5 / 3 / math.log(2))
    assert perplexity_of(1e9) < MAX_NUMBER


def test_errors_are_those_of_repeated_draws_and_no_share_is_certain():
    draws = torch.randn(2000, 16, generator=torch.Generator().manual_seed(0)).tolist()
    spread = statistics.stdev(map(statistics.fmean, draws))
    assert statistics.fmean(map(standard_error, draws)) == pytest.approx(spread, rel=0.05)
    assert standard_error([1.0, 2.0, 4.0], [0.0, 1.0, 3.0]) == 0  # the same windows of two models
    assert standard_error([1.0]) is standard_error([1.0, 2.0], []) is None
    assert share_error(4000, 10_000) == pytest.approx(math.sqrt(0.4 * 0.6 / 10_000), rel=1e-3)
    assert 0.1 < share_error(6, 6) < 0.15


@pytest.mark.parametrize(("shift", "share"), [(0.02, "no difference"), (0.2, "%")])
def test_a_difference_within_two_errors_of_the_same_windows_is_none(shift, share):
    noise = torch.randn(2, 64, generator=torch.Generator().manual_seed(1)).double() / 10

    def result(nats):
        mean = math.fsum(nats) / len(nats)
        scores = {"perplexity": math.exp(mean), "word_perplexity": math.exp(3 * mean), "bits_per_byte": mean / 2}
        error = standard_error(nats)
        return Result(name="a", model="a", nats_per_token=mean, nats_error=error, window_nats=tuple(nats), **scores)

    model, baseline = result((3 + noise[0] + shift).tolist()), result((3 + noise[1]).tolist())
    moved = result([nats + 1e-6 for nats in model.window_nats])
    for here, there in zip(model.measures(), moved.measures(), strict=True):  # each error is that of the nats, scaled
        assert here.error == pytest.approx((there.value - here.value) / 1e-6 * model.nats_error, rel=1e-4)
    pairs = compare(model, baseline)
    assert len(pairs) == 3
    assert all(pair.share_text.endswith((share, f"{share})")) for pair in pairs)
    assert signed(0.02, 0.01).endswith("(no difference)")
    assert signed(0.021, 0.01) == "+0.021 ± 0.01"
    assert signed(-2.6e-4, 1.1e-4) == "−0.00026 ± 0.00011"


@pytest.mark.slow
def test_eval_and_sweep_print_units_that_agree_by_their_counts(folders, text_file, tmp_path, succeed, execute):
    words = ("eval", folders[NAME], "--text", text_file, "--length", 64, "--max-tokens", 512)
    record = json.loads(succeed(*words, "--json"))
    total = record["nats_per_token"] * record["tokens"]
    assert record["perplexity"] == pytest.approx(math.exp(total / record["tokens"]), rel=1e-12)
    assert record["bits_per_byte"] == pytest.approx(total / record["bytes"] / math.log(2), rel=1e-12)
    assert (record["tokens"], record["bytes"], record["word_perplexity"], record["words"]) == (512, 512, None, None)
    out = succeed(*words)
    assert f"perplexity {record['perplexity']:.3f} ± " in out
    assert record["nats_error"] == pytest.approx(statistics.stdev(record["window_nats"]) / math.sqrt(8), rel=1e-12)
    assert "512 tokens, 512 bytes" in out
    assert "word" not in out
    code, out, err = execute(
        "sweep", folders[NAME], "--text", text_file, "--methods", "l1", "--key-dims", 13, "--keep-norm-eps",
        "--text-length", 64, "--max-tokens", 512, "--out", tmp_path / "out",
    )  # fmt: skip
    assert code == 0
    (row,) = SweepRecord.read(tmp_path / "out" / "sweep.json").rows
    assert (row.key_dim, row.compression) == (13, 1 - 13 / 24)
    assert f"{row.bits_per_byte:.4f}" in out
    assert all(f"{row.perplexity:.2f}" in text for text in (out, err))
    size = "measured on 512 tokens, 512 bytes"
    assert all(words in out for words in ("per token", size, "--key-dim 13", "--keep-norm-eps"))


@pytest.mark.parametrize("name", ["prune", "sweep", "eval", "analyze", "recover", "train", "bench calibrate"])
def test_every_command_that_reads_text_has_an_option_for_documents(name, succeed):
    assert "--documents" in succeed(*name.split(), "--help")


@pytest.mark.slow
def test_documents_reach_the_text_and_the_record(folders, tmp_path, succeed, refusal):
    """Where a line is a document, an end-of-text token follows each: fewer characters fit into windows."""
    text, tokens = tmp_path / "text.txt", {}
    text.write_text("a line of text\n" * 200)
    for documents in ("file", "lines"):
        options = ("--text", text, "--length", 64, "--documents", documents, "--json")
        record = json.loads(succeed("eval", folders[NAME], *options))
        assert record["documents"] == record["config"].get("documents") == documents
        tokens[documents] = record["tokens"]
        slimstate.prune(
            folders[NAME], tmp_path / documents, key_dim=16, data=text, documents=documents, samples=4, length=64
        )
        calibration = json.loads((tmp_path / documents / PLAN).read_text())["calibration"]
        assert (calibration.get("documents") or "file") == documents  # in a plan only where it is not the usual
    assert tokens["lines"] - tokens["file"] == pytest.approx(200, abs=64)
    refused = refusal("eval", folders[NAME], "--text", text, "--documents", "pages")
    assert "unknown --documents pages; there are lines, blank, file, rows" in refused
