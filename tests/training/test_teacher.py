"""A teacher predicts what its stock model predicts, from memory or from a cache that is never mistaken for another."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

import tiny
from slimstate.data.corpus import Corpus
from slimstate.kernels.distillation import distilled_loss
from slimstate.models.load import Runtime
from slimstate.system.errors import DataError, OutputError
from slimstate.training import teacher as teachers
from slimstate.training.teacher import ABOUT, LiveTeacher, TeacherCache

NAME = "gated_deltanet-plain"
LENGTH, TEMPERATURE, TOP_K = 24, 2.0, 9
HALF = {"rtol": 1e-3, "atol": 1e-3}
SECOND_FILE = "windows-00000004.safetensors"


def runtime_of(model) -> Runtime:
    return Runtime(model=model, tokenizer=None, device=torch.device("cpu"), dtype=torch.float32, kernels="")


def log_probs(model, ids, temperature=1.0) -> torch.Tensor:
    """Return what the stock model predicts after each token but the last, [tokens, V]."""
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    return (logits[:, :-1].flatten(0, 1) / temperature).log_softmax(-1)


class Loader:
    """Loads the teacher, and counts how often."""

    def __init__(self) -> None:
        self.model, self.loads = tiny.build(tiny.VARIANTS[NAME]), 0

    def __call__(self) -> Runtime:
        self.loads += 1
        return runtime_of(self.model)


@pytest.fixture(autouse=True)
def small_files(monkeypatch):
    monkeypatch.setattr(teachers, "WINDOWS_IN_A_FILE", 4)
    monkeypatch.setitem(teachers.TOKENS_AT_ONCE, "cpu", 3 * LENGTH)  # so that a file takes two batches


@pytest.fixture(scope="module")
def corpora(text_file, tmp_path_factory) -> dict[int, Corpus]:
    """The first 6, 10 and 11 windows of one text: 2, 3 and 3 files."""
    root = tmp_path_factory.mktemp("corpora")
    return {
        count: Corpus.collect(tiny.tokenizer(), str(text_file), LENGTH, count - 1, 1, root / str(count))
        for count in (6, 10, 11)
    }


@pytest.fixture
def cache(tmp_path) -> TeacherCache:
    return TeacherCache(
        folder=tmp_path / "cache", model="sha256:m", dtype="float32", temperature=TEMPERATURE, top_k=TOP_K
    )


@pytest.fixture
def load() -> Loader:
    return Loader()


def ids_of(corpus, places) -> torch.Tensor:
    return torch.from_numpy(corpus.tokens[places].astype("int64"))


def files(cache) -> dict[str, int]:
    """Return when each file of windows was written."""
    return {path.name: path.stat().st_mtime_ns for path in sorted(cache.folder.glob("windows-*"))}


def check_windows(cache, corpus, model, places) -> None:
    """Check that the cache has the most likely tokens of these windows, with their log probabilities."""
    ids = ids_of(corpus, places)
    stored = cache.distribution(ids, torch.tensor(places))
    expected, tokens = log_probs(model, ids, cache.temperature), stored.ids.long()
    assert tokens.shape == stored.log_probs.shape == (len(places) * (LENGTH - 1), cache.top_k)
    assert all(len(set(row)) == cache.top_k for row in tokens.tolist())
    torch.testing.assert_close(stored.log_probs.float(), expected.topk(cache.top_k).values, **HALF)
    torch.testing.assert_close(stored.log_probs.float(), expected.gather(-1, tokens), **HALF)


@pytest.mark.parametrize("name", sorted(tiny.VARIANTS))
def test_a_model_in_memory_predicts_what_its_logits_say(name):
    model, ids = tiny.build(tiny.VARIANTS[name]), tiny.token_ids(2, 30)
    predicted = LiveTeacher(runtime=runtime_of(model)).distribution(ids, torch.arange(2))
    predicted = (predicted.hidden @ predicted.head.mT).log_softmax(-1)
    torch.testing.assert_close(predicted, log_probs(model, ids), rtol=1e-4, atol=1e-4)


def test_a_student_learns_from_a_distribution_and_the_teacher_does_not():
    model, ids = tiny.build(tiny.VARIANTS[NAME]), tiny.token_ids(2, 30)
    predicted = LiveTeacher(runtime=runtime_of(model)).distribution(ids, torch.arange(2))
    hidden = torch.randn(2 * 29, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    head = torch.randn(258, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    distilled_loss(hidden, head, ids[:, 1:].flatten(), predicted)[0].backward()
    assert hidden.grad.any()
    assert head.grad.any()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_autocast_of_the_student_does_not_reach_the_teacher():
    teacher, ids = LiveTeacher(runtime=Loader()()), tiny.token_ids(2, 30)
    plain = teacher.distribution(ids, torch.arange(2))
    with torch.autocast("cpu", torch.bfloat16):
        cast = teacher.distribution(ids, torch.arange(2))
    assert torch.equal(plain.hidden, cast.hidden)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_a_cache_has_the_most_likely_tokens_of_the_teacher(temperature, cache, corpora, load):
    cache = replace(cache, temperature=temperature)
    assert cache.fill(corpora[10], load)
    assert list(files(cache)) == [f"windows-{start:08d}.safetensors" for start in (0, 4, 8)]
    check_windows(cache, corpora[10], load.model, list(range(10)))
    check_windows(cache, corpora[10], load.model, [9, 0, 5, 5, 3])  # in any order, from several files
    check_windows(replace(cache), corpora[10], load.model, [7])


def test_only_what_is_missing_is_computed(cache, corpora, load):
    assert cache.fill(corpora[10], load)
    before = files(cache)
    assert not cache.fill(corpora[10], load)
    assert not replace(cache).fill(corpora[10], load)
    assert (load.loads, files(cache)) == (1, before)
    content = load_file(cache.folder / SECOND_FILE)
    (cache.folder / SECOND_FILE).unlink()
    (cache.folder / f".{SECOND_FILE}.partial-1").write_bytes(b"half a file")  # as a killed run leaves it
    cache.check()
    assert replace(cache).fill(corpora[10], load)
    assert {name for name, time in files(cache).items() if before[name] != time} == {SECOND_FILE}
    again = load_file(cache.folder / SECOND_FILE)
    assert all(torch.equal(again[name], content[name]) for name in ("ids", "log_probs"))
    assert load.loads == 2
    check_windows(cache, corpora[10], load.model, list(range(10)))


def test_filling_continues_after_an_interruption(cache, corpora, load, monkeypatch):
    write = TeacherCache._write

    def stop_at_the_second(self, corpus, start, teacher):
        if start == 4:
            raise KeyboardInterrupt
        write(self, corpus, start, teacher)

    with monkeypatch.context() as patch:
        patch.setattr(TeacherCache, "_write", stop_at_the_second)
        with pytest.raises(KeyboardInterrupt):
            cache.fill(corpora[10], load)
    before = files(cache)
    assert len(before) == 1
    cache.check()
    assert cache.fill(corpora[10], load)
    assert before.items() <= files(cache).items()
    check_windows(cache, corpora[10], load.model, list(range(10)))


def test_more_of_the_same_text_extends_a_cache_and_less_of_it_reuses_it(cache, corpora, load):
    cache.fill(corpora[6], load)
    check_windows(cache, corpora[6], load.model, list(range(6)))
    before = files(cache)
    assert cache.fill(corpora[11], load)
    changed = {name for name, time in files(cache).items() if before.get(name) != time}
    assert changed == {SECOND_FILE, "windows-00000008.safetensors"}
    check_windows(cache, corpora[11], load.model, list(range(11)))
    before = files(cache)
    for count in (6, 10):
        assert not cache.fill(corpora[count], load)
        check_windows(replace(cache), corpora[count], load.model, list(range(count)))
    assert (load.loads, files(cache)) == (2, before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 1.0}, "another temperature: 2.0, not 1.0"),
        ({"top_k": 8}, "another top_k: 9, not 8"),
        ({"model": "sha256:n"}, "another model: sha256:m, not sha256:n"),
        ({"format": 0}, "another format: 0"),
    ],
)
def test_a_cache_of_something_else_is_refused(change, message, cache, corpora, load):
    cache.check()
    cache.fill(corpora[6], load)
    replace(cache, temperature=2).check()
    if "format" in change:
        about = json.loads((cache.folder / ABOUT).read_text())
        (cache.folder / ABOUT).write_text(json.dumps(about | change))
        change = {}
    with pytest.raises(DataError, match=message):
        replace(cache, **change).check()


@pytest.mark.parametrize("change", ["text", "length", "one token"])
def test_a_cache_of_other_tokens_is_refused_before_the_teacher_is_loaded(change, cache, corpora, load, tmp_path):
    cache.fill(corpora[6], load)
    text, place = tiny.text(seed=int(change == "text")), 5 * LENGTH + 3  # in the last window of the last file
    if change == "one token":
        text = f"{text[:place]}#{text[place + 1 :]}"
    (tmp_path / "other.txt").write_text(text)
    length = LENGTH - (change == "length")
    other = Corpus.collect(tiny.tokenizer(), str(tmp_path / "other.txt"), length, 9, 1, tmp_path / "tokens")
    before = files(cache)
    with pytest.raises(DataError, match=r"belongs to other tokens than .*other.txt: choose another `cache_teacher`"):
        cache.fill(other, load)
    assert (load.loads, files(cache)) == (1, before)


def test_a_folder_that_is_not_a_cache_is_refused(cache):
    cache.check()  # it does not exist yet
    cache.folder.mkdir()
    cache.check()  # it is empty
    (cache.folder / "thesis.txt").write_text("years of work")
    with pytest.raises(OutputError, match="is not empty and not a teacher cache"):
        cache.check()
    with pytest.raises(OutputError, match="is a file"):
        replace(cache, folder=cache.folder / "thesis.txt").check()


def test_a_damaged_file_is_named(cache, corpora, load):
    cache.fill(corpora[6], load)
    (cache.folder / SECOND_FILE).write_bytes(b"half a file")
    with pytest.raises(DataError, match=rf"{SECOND_FILE} cannot be read"):
        replace(cache).fill(corpora[6], load)


def test_tokens_beyond_sixteen_bits_are_stored(cache, corpora):
    model = tiny.build(tiny.VARIANTS[NAME], vocab_size=2**16 + 40)
    with torch.no_grad():
        model.get_output_embeddings().weight[: 2**16] *= 0.1  # the last tokens are the most likely
    cache.fill(corpora[6], lambda: runtime_of(model))
    check_windows(cache, corpora[6], model, [0, 5])
    assert cache.distribution(ids_of(corpora[6], [0]), torch.tensor([0])).ids.long().max() >= 2**16


def test_the_loss_approaches_that_of_the_teacher_as_more_tokens_are_cached(cache, corpora, load):
    corpus, places = corpora[6], [1, 4]
    ids = ids_of(corpus, places)
    live = LiveTeacher(runtime=load()).distribution(ids, torch.tensor(places))
    noise = 0.5 * torch.randn(live.hidden.shape, generator=torch.Generator().manual_seed(0))
    hidden = (live.hidden + noise).detach().requires_grad_()

    def loss(distribution):
        losses = distilled_loss(hidden, live.head, ids[:, 1:].flatten(), distribution, temperature=TEMPERATURE)
        return losses[2], torch.autograd.grad(losses[0], hidden)[0]

    whole, gradient = loss(live)
    errors = []
    for k in (8, 64, 257):
        stored = replace(cache, folder=cache.folder / str(k), top_k=k)
        stored.fill(corpus, load)
        part, slope = loss(stored.distribution(ids, torch.tensor(places)))
        errors.append((float((whole - part).abs() / whole), float((slope - gradient).norm() / gradient.norm())))
    assert errors[0] > errors[1] > errors[2]
    assert max(errors[2]) < 5e-3  # of half precision
