"""Every window is trained on once an epoch, a held-out one never, and a sample depends on its number and the seed."""

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from slimstate.data.corpus import ABOUT, MAX_HELD_OUT_WINDOWS, TOKENS, Corpus, Schedule, held_out_count
from slimstate.data.documents import Reading
from slimstate.data.text import token_stream, windows
from slimstate.system.errors import DataError

TOKENIZER = tiny.tokenizer()
LENGTH = 5
sizes = st.integers(1, 130).flatmap(lambda count: st.tuples(st.just(count), st.integers(0, min(count - 1, 64))))
DAMAGES = [
    (lambda folder: (folder / TOKENS).write_bytes((folder / TOKENS).read_bytes()[:-4]), "is not complete"),
    *[(lambda folder, name=name: (folder / name).unlink(), "holds no training tokens") for name in (TOKENS, ABOUT)],
    *[
        (lambda folder, text=text: (folder / ABOUT).write_text(text), "holds no training tokens")
        for text in ('{"source": "a te', "[1, 2]", '{"length": 64}')
    ],
]


class RecordingTokenizer:
    """The tokenizer, with the batches of texts that it was called with."""

    eos_token_id = TOKENIZER.eos_token_id

    def __init__(self) -> None:
        self.batches: list[list[str]] = []

    def __call__(self, texts, **options):
        self.batches.append(list(texts))
        return TOKENIZER(texts, **options)


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    """Return a function that makes a corpus in which every token of window i is i."""
    path = tmp_path_factory.mktemp("numbered") / TOKENS

    def make(count: int, held_out: int) -> Corpus:
        np.repeat(np.arange(count, dtype=np.int32), LENGTH).tofile(path)
        return Corpus(path=path, source="numbers", length=LENGTH, count=count, held_out=held_out, digest="")

    return make


@pytest.fixture
def documents(tmp_path):
    path = tmp_path / "documents.jsonl"
    lines = [json.dumps({"text": tiny.text(150 + 10 * number, number)}) for number in range(40)]
    path.write_text("\n".join(lines))
    return path


def places_of(schedule: Schedule, samples: range) -> list[int]:
    """Return the windows of these samples; each is full and has its place."""
    places = []
    for sample in (schedule[number] for number in samples):
        assert sample["input_ids"].dtype == torch.int64
        assert sample["input_ids"].tolist() == [int(sample["place"])] * LENGTH
        places.append(int(sample["place"]))
    return places


@settings(max_examples=60, deadline=None)
@given(size=sizes)
def test_held_out_windows_are_spread_evenly_and_apart_from_the_rest(size, numbered):
    count, held_out = size
    corpus = numbered(count, held_out)
    held = corpus.held_out_windows[:, 0].tolist()
    assert corpus.held_out_windows.shape == (held_out, LENGTH)
    assert sorted([*held, *corpus.training_windows.tolist()]) == list(range(count))
    gaps = np.diff(held)
    assert all(abs(gap - count / held_out) < 1 for gap in gaps)
    if held_out:
        assert abs((held[0] + held[-1]) - (count - 1)) <= 2  # as far from the start as from the end


@settings(max_examples=25, deadline=None)
@given(size=sizes, seed=st.integers(0, 2**31))
def test_every_epoch_visits_every_training_window_once_and_no_other(size, seed, numbered):
    corpus = numbered(*size)
    training = corpus.training_windows.tolist()
    count = len(training)
    schedule = Schedule(corpus, 3 * count, seed)
    assert (len(schedule), schedule.epochs) == (3 * count, 3)
    for epoch in range(3):
        assert sorted(places_of(schedule, range(epoch * count, (epoch + 1) * count))) == training


def test_orders_differ_between_epochs_and_seeds(numbered):
    corpus = numbered(60, 3)
    orders = [places_of(Schedule(corpus, 171, seed), range(171)) for seed in (0, 1, 0)]
    assert orders[0] == orders[2] != orders[1]
    for order in orders:
        epochs = [tuple(order[start : start + 57]) for start in range(0, 171, 57)]
        assert len({*epochs, tuple(sorted(epochs[0]))}) == 4


def test_a_sample_depends_on_nothing_but_its_number_and_the_seed(numbered):
    corpus = numbered(20, 2)
    once = places_of(Schedule(corpus, 100, 7), range(100))
    torch.manual_seed(123)
    longer = Schedule(replace(corpus, source="elsewhere"), 1000, 7)
    backwards = [int(longer[number]["place"]) for number in reversed(range(100))]
    assert backwards[::-1] == once
    for number in (99, 3, 41):
        assert int(Schedule(corpus, 100, 7)[number]["place"]) == once[number]
    halves = [Schedule(corpus, 100, 7) for _ in range(2)]  # as two processes take turns
    assert [int(halves[number % 2][number]["place"]) for number in range(100)] == once


def test_a_corpus_is_the_first_windows_of_the_text(text_file, tmp_path):
    corpus = Corpus.collect(TOKENIZER, str(text_file), 64, samples=30, held_out=3, folder=tmp_path)
    expected = torch.stack(list(windows(TOKENIZER, str(text_file), 64, max_windows=33)))
    assert torch.equal(torch.from_numpy(corpus.tokens.copy()), expected)
    assert corpus == Corpus.open(tmp_path)
    about = {"data": str(text_file), "documents": "file", "length": 64, "windows": 33, "held_out": 3}
    assert corpus.describe() == {**about, "digest": corpus.digest}


def test_a_shorter_text_gives_fewer_windows_all_full(text_file, tmp_path):
    full = [window for window in windows(TOKENIZER, str(text_file), 1000) if len(window) == 1000]
    corpus = Corpus.collect(TOKENIZER, str(text_file), 1000, samples=10**6, held_out=2, folder=tmp_path)
    assert corpus.count == len(full)
    assert torch.equal(torch.from_numpy(corpus.tokens.copy()), torch.stack(full))
    assert corpus.held_out == 1  # of so few windows
    assert Schedule(corpus, 80, 0).epochs == 80 / (len(full) - 1)


def test_no_more_is_read_than_is_needed(documents, tmp_path, monkeypatch):
    """The rest of the file, here invalid, is not read."""
    monkeypatch.setattr("slimstate.data.documents.PIECE", 200)
    with documents.open("a") as file:
        file.write("\nnot json\n")
    tokenizer = RecordingTokenizer()
    Corpus.collect(tokenizer, str(documents), 64, samples=9, held_out=1, folder=tmp_path / "some")
    assert 640 <= sum(len(text) for batch in tokenizer.batches for text in batch) < 2000
    with pytest.raises(DataError, match="line 41"):
        Corpus.collect(tokenizer, str(documents), 64, samples=10**6, held_out=1, folder=tmp_path / "all")
    assert not list((tmp_path / "all").glob("*"))


@pytest.mark.parametrize("held_out", [0, 1])
def test_too_little_text_is_counted(held_out, tmp_path):
    (tmp_path / "text.txt").write_text(tiny.text()[: 20 * (held_out + 1) - 2])  # and an end: one token too few
    with pytest.raises(DataError, match=f"has {held_out} of the {held_out + 1} windows of 20 tokens"):
        Corpus.collect(TOKENIZER, str(tmp_path / "text.txt"), 20, 5, held_out, tmp_path / "out")
    with pytest.raises(DataError, match="holds no training tokens"):
        Corpus.open(tmp_path / "out")
    (tmp_path / "text.txt").write_text(tiny.text()[: 20 * (held_out + 1) - 1])
    corpus = Corpus.collect(TOKENIZER, str(tmp_path / "text.txt"), 20, 5, held_out, tmp_path / "out")
    assert corpus.count == held_out + 1


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_damaged_tokens_are_refused(damage, message, text_file, tmp_path):
    Corpus.collect(TOKENIZER, str(text_file), 64, 5, 1, tmp_path)
    Corpus.open(tmp_path)
    damage(tmp_path)
    with pytest.raises(DataError, match=message):
        Corpus.open(tmp_path)


def test_the_digest_is_that_of_the_tokens(text_file, tmp_path):
    def collect(text: str, samples: int) -> Corpus:
        (tmp_path / "text.txt").write_text(text)
        return Corpus.collect(TOKENIZER, str(tmp_path / "text.txt"), 64, samples, 1, tmp_path / "tokens")

    text = text_file.read_text()
    first = collect(text, 5)
    assert first.digest == "sha256:" + hashlib.sha256(first.tokens.tobytes()).hexdigest()
    other = ("b" if text[100] == "a" else "a").join((text[:100], text[101:]))
    digests = [collect(*changed).digest for changed in ((text[: 64 * 6], 5), (other, 5), (text, 6))]
    assert digests[0] == first.digest
    assert len({*digests}) == 3


def test_some_windows_are_always_held_out_and_never_many():
    counts = [held_out_count(samples) for samples in range(1, 10_000)]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (1, MAX_HELD_OUT_WINDOWS)
    assert all(64 * count <= max(64, samples) for samples, count in enumerate(counts, start=1))


@pytest.mark.parametrize("kind", ["jsonl", "txt", "folder"])
def test_pieces_tokenised_together_are_those_tokenised_one_by_one(kind, documents, tmp_path, monkeypatch):
    monkeypatch.setattr("slimstate.data.documents.PIECE", 100)
    source = documents
    if kind != "jsonl":
        source = tmp_path / "texts"
        source.mkdir()
        for number in range(5 if kind == "folder" else 1):
            (source / f"{number}.txt").write_text(tiny.text(3000, number) + "\n" * (number % 2))
        (source / "x.jsonl").write_text('{"text": ""}\n{"text": " "}\n')
        source = source if kind == "folder" else source / "0.txt"
    tokenizer = RecordingTokenizer()
    end = [TOKENIZER.eos_token_id]
    one_by_one = [TOKENIZER(piece.text)["input_ids"] + end * piece.ends for piece in Reading(str(source)).pieces()]
    assert list(token_stream(tokenizer, str(source))) == one_by_one
    batch_sizes = [sum(map(len, batch)) for batch in tokenizer.batches]
    assert len(one_by_one) > 2 * len(tokenizer.batches)  # many were tokenised together
    assert batch_sizes[0] < batch_sizes[-2]
