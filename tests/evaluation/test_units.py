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
from slimstate.core.standard_errors import residual_error, share_error, standard_error
from slimstate.evaluation.associative_recall import recall_change
from slimstate.evaluation.measure import compare
from slimstate.evaluation.perplexity import TextSize, evaluation_windows, perplexity_of
from slimstate.models.load import load_tokenizer
from slimstate.records.evaluation import AssociativeRecall, EvaluationRecord, MeasurePair, RecallPoint, Result
from slimstate.records.numbers import signed
from slimstate.records.schema import MAX_NUMBER

NAME = tiny.PLAIN[0]
TOKENIZER = load_tokenizer(ROOT / "demo" / "model")
POINTS = (RecallPoint(pairs=2, accuracy=0.5),)
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
    twice = [number for number in ids for _ in range(1 + (number == TOKENIZER.eos_token_id))]  # EOS, and BOS after it
    assert TextSize.of(TOKENIZER, torch.tensor([twice])).bytes == len("one two\nthree")
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


def test_errors_of_word_perplexity_are_those_of_repeated_draws_of_pages():
    """Pages differ in length, and both models find the same pages hard."""

    def draw() -> tuple[Result, Result]:
        words = torch.randint(20, 2000, (30,), generator=random)
        hard, *own = (torch.randn(3, 30, generator=random).double() * torch.tensor([[0.2], [0.05], [0.05]])).unbind()
        return tuple(
            Result(
                name="a", model="a", word_perplexity=math.exp(float((words * level).sum() / words.sum())),
                page_nats=tuple((words * level).tolist()), page_words=tuple(words.tolist()),
            )
            for level in (4.8 + hard + own[0], 4.5 + 0.9 * hard + own[1])
        )  # fmt: skip

    random = torch.Generator().manual_seed(0)
    draws = [draw() for _ in range(2000)]
    pairs = [compare(*results)[0] for results in draws]
    for values, errors in (
        ([math.log(pair.model) for pair in pairs], [residual_error(model.page_residuals) for model, _ in draws]),
        ([pair.model for pair in pairs], [next(model.measures()).error for model, _ in draws]),
        ([pair.model - pair.baseline for pair in pairs], [pair.error for pair in pairs]),
        ([pair.share for pair in pairs], [pair.share_error for pair in pairs]),
    ):
        assert statistics.fmean(errors) == pytest.approx(statistics.stdev(values), rel=0.06)
    assert statistics.fmean(pair.share_error for pair in pairs) < 0.02, "paired"


def test_one_page_or_other_pages_have_no_error():
    scores = {"name": "a", "model": "a", "perplexity": 9.0, "word_perplexity": 50.0}
    scores |= {"nats_error": 0.1, "window_nats": (3.0, 4.0)}
    one = Result(**scores, page_nats=(40.0,), page_words=(10,))
    assert [measure.error is None for measure in one.measures()] == [False, True]
    several = Result(**scores, page_nats=(40.0, 38.0), page_words=(10, 10))
    for pairs in (compare(one, one), compare(several, one), compare(Result(**scores), Result(**scores))):
        assert (pairs[1].error, pairs[1].share_text) == (None, "100.0%")
    for result, names in ((one, ["perplexity", "word perplexity"]), (several, ["word perplexity"])):
        record = EvaluationRecord(**vars(result), baseline=result, compared=compare(result, result))
        assert [row[0] for row in record.comparison(main=True)] == names
    old = MeasurePair(measure="word perplexity", model=50.0, baseline=50.0, share=1.0, error=3.0)  # over windows
    for result, error in ((Result(**scores), None), (several, 3.0)):
        record = EvaluationRecord.from_json(EvaluationRecord(**vars(result), compared=(old,)).to_json())
        assert record.compared[0].error == record.table()[1]["difference_error"] == error


def test_errors_of_shares_are_those_of_repeated_draws():
    """Of bits per byte on the same windows, and of two accuracies on their own questions."""

    def result(bits: torch.Tensor, right: torch.Tensor) -> Result:
        error, nats = float(right.std() / 20), bits.tolist()
        recall = AssociativeRecall(points=POINTS, mean=float(right.mean()), stderr=error, candidates=8)
        mean = statistics.fmean(nats)
        loss = {"nats_per_token": mean, "nats_error": standard_error(nats), "window_nats": tuple(nats)}
        return Result(name="a", model="a", bits_per_byte=mean / 2, associative_recall=recall, **loss)

    random = torch.Generator().manual_seed(0)
    pairs = []
    for _ in range(2000):
        windows, rights = torch.randn(3, 32, generator=random).double(), torch.rand(2, 400, generator=random)
        model = result(5 + 0.3 * windows[0] + 0.1 * windows[1], (rights[0] < 0.5).double())
        pairs.append(compare(model, result(4 + 0.3 * windows[0] + 0.1 * windows[2], (rights[1] < 0.8).double())))
    for name, number in (("bits per byte", 0), ("associative recall", 1)):
        same = [pair[number] for pair in pairs]
        assert same[0].measure == name
        spread = statistics.stdev(pair.share for pair in same)
        assert statistics.fmean(pair.share_error for pair in same) == pytest.approx(spread, rel=0.05)


def recall_of(shares: list[list[float]], digest: str = "a") -> Result:
    means = [statistics.fmean(each) for each in shares]
    points = [
        RecallPoint(pairs=2 + number, accuracy=mean, stderr=0.1, shares=tuple(each))
        for number, (mean, each) in enumerate(zip(means, shares, strict=True))
    ]
    mean = statistics.fmean(means)
    recall = AssociativeRecall(points=tuple(points), mean=mean, stderr=0.07, candidates=8, digest=digest)
    return Result(name="a", model="a", associative_recall=recall)


def test_errors_of_recall_on_the_same_sequences_are_those_of_repeated_draws():
    """Both models find the same sequences hard; numbers of pairs have different numbers of sequences."""

    def draw() -> tuple[Result, Result]:
        noise = [torch.randn(3, count, generator=random).double() / 20 for count in (32, 8)]
        return tuple(recall_of([(level + 2 * each[0] + each[own]).tolist() for each in noise]) for level, own in levels)

    levels = ((0.5, 1), (0.8, 2))
    random = torch.Generator().manual_seed(0)
    draws = [draw() for _ in range(2000)]
    compared = [compare(*results) for results in draws]
    for number in range(3):
        pairs = [each[number] for each in compared]
        for values, errors in (
            ([pair.model - pair.baseline for pair in pairs], [pair.error for pair in pairs]),
            ([pair.share for pair in pairs], [pair.share_error for pair in pairs]),
        ):
            assert statistics.fmean(errors) == pytest.approx(statistics.stdev(values), rel=0.06)
    cut, uncut = (result.associative_recall for result in draws[0])
    assert recall_change(cut, uncut) == pytest.approx((cut.mean - uncut.mean, compared[0][0].error))


def test_recall_on_other_sequences_or_changed_alike_in_all_of_them_has_the_error_of_independent_numbers():
    shares, others, alike = [[0.2, 0.4], [0.1, 0.2]], [[0.4, 0.8], [0.4, 0.3]], [[0.3, 0.5], [0.2, 0.3]]
    pairs = compare(recall_of(shares), recall_of(others))  # which differ by 0.2 and 0.4, and by 0.3 and 0.1
    assert [pair.error for pair in pairs] == pytest.approx([math.hypot(0.1, 0.1) / 2, 0.1, 0.1])
    for baseline in (recall_of(others, "b"), recall_of([each[:1] for each in others]), recall_of(alike)):
        errors = [pair.error for pair in compare(recall_of(shares), baseline)]
        assert errors == pytest.approx([math.hypot(each, each) for each in (0.07, 0.1, 0.1)])
    assert [pair.error for pair in compare(recall_of(shares), recall_of(shares))] == [0, 0, 0]


@pytest.mark.parametrize(("shift", "is_same"), [(0.02, True), (0.2, False)])
def test_a_difference_within_two_errors_of_the_same_windows_is_none(shift, is_same):
    noise = torch.randn(2, 64, generator=torch.Generator().manual_seed(1)).double() / 10

    def result(nats):
        mean = math.fsum(nats) / len(nats)
        scores = {"perplexity": math.exp(mean), "word_perplexity": math.exp(3 * mean), "bits_per_byte": mean / 2}
        loss = {"nats_per_token": mean, "nats_error": standard_error(nats), "window_nats": tuple(nats)}
        pages = {"page_nats": tuple(30 * each for each in nats), "page_words": (10,) * len(nats)}
        return Result(name="a", model="a", **loss, **scores, **pages)

    model, baseline = result((3 + noise[0] + shift).tolist()), result((3 + noise[1]).tolist())
    moved = result([nats + 1e-6 for nats in model.window_nats])
    for here, there in zip(model.measures(), moved.measures(), strict=True):  # each error is that of the nats, scaled
        assert here.error == pytest.approx((there.value - here.value) / 1e-6 * model.nats_error, rel=1e-4)
    pairs = compare(model, baseline)
    assert len(pairs) == 3
    for pair in pairs:
        ending = " (no difference)" if is_same else ""
        assert pair.share_text == f"{100 * pair.share:.1f}% ± {100 * pair.share_error:.2g}{ending}"
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
    (row,) = json.loads((tmp_path / "out" / "sweep.json").read_text())["rows"]
    assert (row["key_dim"], row["compression"]) == (13, 1 - 13 / 24)
    assert f"{row['bits_per_byte']:.4f}" in out
    assert all(f"{row['perplexity']:.2f}" in text for text in (out, err))
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
        windows = {"data": text, "documents": documents, "samples": 4, "length": 64}
        slimstate.prune(folders[NAME], tmp_path / documents, key_dim=16, **windows)
        calibration = json.loads((tmp_path / documents / PLAN).read_text())["calibration"]
        assert (calibration.get("documents") or "file") == documents  # in a plan only where it is not the usual
    assert tokens["lines"] - tokens["file"] == pytest.approx(200, abs=64)
    refused = refusal("eval", folders[NAME], "--text", text, "--documents", "pages")
    assert "unknown --documents pages; there are lines, blank, file, rows" in refused
