"""A teacher gives what its stock model gives, from memory or from a folder that is never taken for another one."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

import tiny
from slimstate.data.corpus import Corpus
from slimstate.kernels.distillation import FullDistribution, distilled_loss
from slimstate.models.load import Runtime
from slimstate.system.errors import DataError, OutputError
from slimstate.training import teacher as teachers
from slimstate.training.teacher import ABOUT, LiveTeacher, TeacherCache

NAME = "gated_deltanet-plain"
LENGTH, TEMPERATURE, TOP_K = 24, 2.0, 9
HALF = {"rtol": 1e-3, "atol": 1e-3}


def runtime_of(model) -> Runtime:
    return Runtime(model=model, tokenizer=None, device=torch.device("cpu"), dtype=torch.float32, kernels="")


def log_probs(model, ids, temperature=1.0) -> torch.Tensor:
    """Of what comes after each token but the last, by the stock model: [tokens, V]."""
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    return (logits[:, :-1].flatten(0, 1) / temperature).log_softmax(-1)


class Loader:
    """Brings the teacher, and counts how often."""

    def __init__(self, model=None) -> None:
        self.model = tiny.build(tiny.VARIANTS[NAME]) if model is None else model
        self.loads = 0

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


def ids_of(corpus, places) -> torch.Tensor:
    return torch.from_numpy(corpus.tokens[places].astype("int64"))


def files(cache) -> dict[str, int]:
    """When each file of windows was written."""
    return {path.name: path.stat().st_mtime_ns for path in sorted(cache.folder.glob("windows-*"))}


def agrees(cache, corpus, model, places) -> None:
    """The cache holds the best tokens of these windows, with their log probabilities."""
    ids = ids_of(corpus, places)
    found = cache.distribution(ids, torch.tensor(places))
    expected = log_probs(model, ids, cache.temperature)
    chosen = found.ids.long()
    assert chosen.shape == found.log_probs.shape == (len(places) * (LENGTH - 1), cache.top_k)
    assert all(len(set(row)) == cache.top_k for row in chosen.tolist())
    torch.testing.assert_close(found.log_probs.float(), expected.topk(cache.top_k).values, **HALF)
    torch.testing.assert_close(found.log_probs.float(), expected.gather(-1, chosen), **HALF)


@pytest.mark.parametrize("name", sorted(tiny.VARIANTS))
def test_the_distribution_of_a_model_in_memory_is_that_of_its_logits(name):
    model, ids = tiny.build(tiny.VARIANTS[name]), tiny.token_ids(2, 30)
    found = LiveTeacher(runtime=runtime_of(model)).distribution(ids, torch.arange(2))
    found = (found.hidden @ found.head.mT).log_softmax(-1)
    torch.testing.assert_close(found, log_probs(model, ids), rtol=1e-4, atol=1e-4)


def test_a_distribution_can_be_learnt_from_and_the_teacher_learns_nothing():
    model, ids = tiny.build(tiny.VARIANTS[NAME]), tiny.token_ids(2, 30)
    found = LiveTeacher(runtime=runtime_of(model)).distribution(ids, torch.arange(2))
    hidden = torch.randn(2 * 29, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    head = torch.randn(258, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    distilled_loss(hidden, head, ids[:, 1:].flatten(), found)[0].backward()
    assert hidden.grad.any()
    assert head.grad.any()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_autocast_of_the_student_does_not_reach_the_teacher():
    model, ids = tiny.build(tiny.VARIANTS[NAME]), tiny.token_ids(2, 30)
    teacher = LiveTeacher(runtime=runtime_of(model))
    plain = teacher.distribution(ids, torch.arange(2))
    with torch.autocast("cpu", torch.bfloat16):
        cast = teacher.distribution(ids, torch.arange(2))
    assert torch.equal(plain.hidden, cast.hidden)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_a_cache_holds_the_best_tokens_of_the_live_teacher(temperature, cache, corpora):
    load = Loader()
    cache = replace(cache, temperature=temperature)
    assert cache.fill(corpora[10], load)
    assert list(files(cache)) == [f"windows-{start:08d}.safetensors" for start in (0, 4, 8)]
    agrees(cache, corpora[10], load.model, list(range(10)))
    agrees(cache, corpora[10], load.model, [9, 0, 5, 5, 3])  # in any order, from several files
    agrees(replace(cache), corpora[10], load.model, [7])


def test_a_teacher_is_loaded_only_where_something_is_missing(cache, corpora):
    load = Loader()
    assert cache.fill(corpora[10], load)
    written = files(cache)
    assert not cache.fill(corpora[10], load)
    assert not replace(cache).fill(corpora[10], load)
    assert (load.loads, files(cache)) == (1, written)


def test_only_a_file_that_is_missing_is_made_again(cache, corpora):
    load = Loader()
    cache.fill(corpora[10], load)
    written = files(cache)
    lost = "windows-00000004.safetensors"
    content = load_file(cache.folder / lost)
    (cache.folder / lost).unlink()
    cache.check()
    assert replace(cache).fill(corpora[10], load)
    assert {name for name, time in files(cache).items() if written[name] != time} == {lost}
    again = load_file(cache.folder / lost)
    assert all(torch.equal(again[name], content[name]) for name in ("ids", "log_probs"))
    assert load.loads == 2


def test_filling_that_was_stopped_goes_on(cache, corpora, monkeypatch):
    load, write = Loader(), TeacherCache._write

    def stop_at_the_second(self, corpus, start, teacher):
        if start == 4:
            raise KeyboardInterrupt
        write(self, corpus, start, teacher)

    with monkeypatch.context() as patch:
        patch.setattr(TeacherCache, "_write", stop_at_the_second)
        with pytest.raises(KeyboardInterrupt):
            cache.fill(corpora[10], load)
    written = files(cache)
    assert len(written) == 1
    cache.check()
    assert cache.fill(corpora[10], load)
    assert written.items() <= files(cache).items()
    agrees(cache, corpora[10], load.model, list(range(10)))


def test_more_of_the_same_text_extends_a_cache_and_less_of_it_reuses_it(cache, corpora):
    load = Loader()
    cache.fill(corpora[6], load)
    agrees(cache, corpora[6], load.model, list(range(6)))
    written = files(cache)
    assert cache.fill(corpora[11], load)
    changed = {name for name, time in files(cache).items() if written.get(name) != time}
    assert changed == {"windows-00000004.safetensors", "windows-00000008.safetensors"}
    agrees(cache, corpora[11], load.model, list(range(11)))
    written = files(cache)
    for count in (6, 10):
        assert not cache.fill(corpora[count], load)
        agrees(replace(cache), corpora[count], load.model, list(range(count)))
    assert (load.loads, files(cache)) == (2, written)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 1.0}, "another temperature: 2.0, not 1.0"),
        ({"top_k": 8}, "another top_k: 9, not 8"),
        ({"model": "sha256:n"}, "another model: sha256:m, not sha256:n"),
    ],
)
def test_a_cache_of_something_else_is_refused(change, message, cache, corpora):
    cache.check()
    cache.fill(corpora[6], Loader())
    replace(cache, temperature=2).check()
    with pytest.raises(DataError, match=message):
        replace(cache, **change).check()


def test_a_cache_of_an_older_format_is_refused(cache, corpora):
    cache.fill(corpora[6], Loader())
    about = json.loads((cache.folder / ABOUT).read_text())
    (cache.folder / ABOUT).write_text(json.dumps({**about, "format": 0}))
    with pytest.raises(DataError, match="another format: 0"):
        cache.check()


@pytest.mark.parametrize("change", ["text", "length", "one token"])
def test_a_cache_of_other_tokens_is_refused_before_the_teacher_is_loaded(change, cache, corpora, tmp_path):
    load = Loader()
    cache.fill(corpora[6], load)
    text, length = tiny.text(), LENGTH
    if change == "text":
        text = tiny.text(seed=1)
    elif change == "length":
        length = LENGTH - 1
    else:
        place = 5 * LENGTH + 3  # in the last window of the last file
        text = f"{text[:place]}#{text[place + 1 :]}"
    (tmp_path / "other.txt").write_text(text)
    other = Corpus.collect(tiny.tokenizer(), str(tmp_path / "other.txt"), length, 9, 1, tmp_path / "tokens")
    written = files(cache)
    with pytest.raises(DataError, match=r"is of other tokens than .*other.txt: use another folder as `cache_teacher`"):
        cache.fill(other, load)
    assert (load.loads, files(cache)) == (1, written)


def test_a_folder_that_is_no_cache_is_refused(cache):
    cache.check()  # nothing there yet
    cache.folder.mkdir()
    cache.check()  # nothing in it
    (cache.folder / "thesis.txt").write_text("years of work")
    with pytest.raises(OutputError, match="is not empty and no teacher cache"):
        cache.check()
    with pytest.raises(OutputError, match="is a file"):
        replace(cache, folder=cache.folder / "thesis.txt").check()


def test_what_a_killed_run_left_half_written_is_not_read(cache, corpora):
    load = Loader()
    cache.fill(corpora[6], load)
    (cache.folder / "windows-00000004.safetensors").unlink()
    (cache.folder / ".windows-00000004.safetensors.partial-1").write_bytes(b"half a file")
    cache.check()
    assert cache.fill(corpora[6], load)
    agrees(cache, corpora[6], load.model, list(range(6)))


def test_a_file_that_is_broken_is_named(cache, corpora):
    cache.fill(corpora[6], Loader())
    (cache.folder / "windows-00000004.safetensors").write_bytes(b"half a file")
    with pytest.raises(DataError, match=r"windows-00000004.safetensors cannot be read"):
        replace(cache).fill(corpora[6], Loader())


def test_tokens_beyond_sixteen_bits_survive(cache, corpora):
    model = tiny.build(tiny.VARIANTS[NAME], vocab_size=2**16 + 40)
    with torch.no_grad():
        model.get_output_embeddings().weight[: 2**16] *= 0.1  # the last tokens are the best
    cache.fill(corpora[6], lambda: runtime_of(model))
    agrees(cache, corpora[6], model, [0, 5])
    assert cache.distribution(ids_of(corpora[6], [0]), torch.tensor([0])).ids.long().max() >= 2**16


def test_the_loss_with_nearly_all_tokens_cached_is_that_of_the_live_teacher(cache, corpora):
    corpus, load, places = corpora[6], Loader(), [1, 4]
    ids = ids_of(corpus, places)
    live = LiveTeacher(runtime=load()).distribution(ids, torch.tensor(places))
    hidden = (live.hidden + 0.5 * torch.randn(live.hidden.shape, generator=torch.Generator().manual_seed(0))).detach()
    hidden.requires_grad_()
    targets = ids[:, 1:].flatten()

    def loss(theirs):
        found = distilled_loss(hidden, live.head, targets, theirs, temperature=TEMPERATURE)
        return found[2], torch.autograd.grad(found[0], hidden)[0]

    whole, gradient = loss(live)
    assert isinstance(live, FullDistribution)
    misses = []
    for k in (8, 64, 257):
        kept = replace(cache, folder=cache.folder / str(k), top_k=k)
        kept.fill(corpus, load)
        found, slope = loss(kept.distribution(ids, torch.tensor(places)))
        misses.append((float((whole - found).abs() / whole), float((slope - gradient).norm() / gradient.norm())))
    assert misses[0] > misses[1] > misses[2]
    assert max(misses[2]) < 5e-3  # of half precision
