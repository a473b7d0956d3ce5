"""A teacher predicts what its stock model predicts, from memory or from a cache that is never mistaken for another."""

import json
import shutil
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

import tiny
from slimstate.checkpoints.reader import Checkpoint
from slimstate.data.corpus import Corpus
from slimstate.system.errors import DataError, OutputError
from slimstate.system.json_files import read_json, write_json
from slimstate.training import teacher as teachers
from slimstate.training.options import RecoverOptions
from slimstate.training.teacher import ABOUT, Distillation, LiveTeacher, TeacherCache

pytestmark = pytest.mark.slow
NAME = "gated_deltanet-plain"
LENGTH, TEMPERATURE, TOP_K = 24, 2.0, 9
HALF = {"rtol": 1e-3, "atol": 1e-3}
SECOND_FILE = "windows-00000004.safetensors"


def log_probs(model, ids, temperature=1.0) -> torch.Tensor:
    """Return what the stock model predicts after each token but the last, [tokens, V]."""
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    return (logits[:, :-1].flatten(0, 1) / temperature).log_softmax(-1)


@pytest.fixture(autouse=True)
def small_files(monkeypatch):
    monkeypatch.setattr(teachers, "WINDOWS_IN_A_FILE", 4)
    monkeypatch.setitem(teachers.TOKENS_AT_ONCE, "cpu", 3 * LENGTH)  # so that a file takes two batches


@pytest.fixture(scope="module")
def corpora(text_file, tmp_path_factory) -> dict[int, Corpus]:
    """The first 6, 10 and 11 windows of one text: 2, 3 and 3 files."""
    root = tmp_path_factory.mktemp("corpora")
    text = (tiny.tokenizer(), str(text_file), LENGTH)
    return {count: Corpus.collect(*text, count - 1, 1, root / str(count)) for count in (6, 10, 11)}


@pytest.fixture
def cache(tmp_path) -> TeacherCache:
    settings = {"model": "sha256:m", "dtype": "float32", "temperature": TEMPERATURE, "top_k": TOP_K}
    return TeacherCache(folder=tmp_path / "cache", **settings)


@pytest.fixture
def load() -> Mock:
    """Loads the teacher, and counts how often."""
    model = tiny.build(tiny.VARIANTS[NAME])
    return Mock(return_value=tiny.runtime(model), model=model)


def ids_of(corpus, places) -> torch.Tensor:
    return torch.from_numpy(corpus.tokens[places].astype("int64"))


def files(cache) -> dict[str, int]:
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
    taught = LiveTeacher(runtime=tiny.runtime(model)).distribution(ids, torch.arange(2))
    assert not taught.hidden.requires_grad  # the teacher does not learn
    assert not taught.head.requires_grad
    predicted = (taught.hidden @ taught.head.mT).log_softmax(-1)
    torch.testing.assert_close(predicted, log_probs(model, ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", sorted(tiny.VARIANTS))
def test_states_have_the_dtype_of_the_head(name):
    model = tiny.build(tiny.VARIANTS[name]).to(torch.bfloat16)
    taught = LiveTeacher(runtime=tiny.runtime(model)).distribution(tiny.token_ids(1, 8), torch.arange(1))
    assert taught.hidden.dtype == taught.head.dtype == torch.bfloat16


def test_a_cache_of_a_model_within_another_has_its_vocabulary(folders, tmp_path):
    folder = shutil.copytree(folders["qwen3_5-plain"], tmp_path / "model")
    config = read_json(folder / "config.json")
    write_json(folder / "config.json", {name: value for name, value in config.items() if name != "vocab_size"})
    options = RecoverOptions.from_values({"data": "text.txt", "cache_teacher": tmp_path / "cache", "cache_top_k": 999})
    distillation = Distillation.of(Checkpoint.open(folder), options.distillation, options.run)
    assert distillation.cache.top_k == config["text_config"]["vocab_size"] - 1


def test_autocast_of_the_student_does_not_reach_the_teacher(load):
    teacher, ids = LiveTeacher(runtime=load()), tiny.token_ids(2, 30)
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


def test_only_what_is_missing_is_computed(cache, corpora, load, monkeypatch):
    """Where filling was interrupted, where nothing is missing, and where a file was removed."""
    write = TeacherCache._write

    def stop_at_the_second(self, corpus, start, teacher):
        if start == 4:
            raise KeyboardInterrupt
        write(self, corpus, start, teacher)

    with monkeypatch.context() as patch:
        patch.setattr(TeacherCache, "_write", stop_at_the_second)
        with pytest.raises(KeyboardInterrupt):
            cache.fill(corpora[10], load)
    first = files(cache)
    assert len(first) == 1
    cache.check()
    assert cache.fill(corpora[10], load)
    before = files(cache)
    assert first.items() <= before.items()
    assert not cache.fill(corpora[10], load)
    assert not replace(cache).fill(corpora[10], load)
    assert (load.call_count, files(cache)) == (2, before)
    content = load_file(cache.folder / SECOND_FILE)
    (cache.folder / SECOND_FILE).unlink()
    (cache.folder / f".{SECOND_FILE}.partial-1").write_bytes(b"half a file")  # as a killed run leaves it
    cache.check()
    assert replace(cache).fill(corpora[10], load)
    assert {name for name, time in files(cache).items() if before[name] != time} == {SECOND_FILE}
    again = load_file(cache.folder / SECOND_FILE)
    assert all(torch.equal(again[name], content[name]) for name in ("ids", "log_probs"))
    assert load.call_count == 3
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
    assert (load.call_count, files(cache)) == (2, before)


def test_a_cache_of_something_else_is_refused(cache, corpora, load):
    cache.check()  # it does not exist yet
    cache.folder.mkdir()
    cache.check()  # it is empty
    cache.fill(corpora[6], load)
    replace(cache, temperature=2).check()
    for name, before, now in (("temperature", 2.0, 1.0), ("top_k", 9, 8), ("model", "sha256:m", "sha256:n")):
        with pytest.raises(DataError, match=f"another {name}: {before}, not {now}"):
            replace(cache, **{name: now}).check()
    about = json.loads((cache.folder / ABOUT).read_text())
    (cache.folder / ABOUT).write_text(json.dumps(about | {"format": 0}))
    with pytest.raises(DataError, match="another format: 0"):
        cache.check()
    (cache.folder / ABOUT).rename(cache.folder / "thesis.txt")
    with pytest.raises(OutputError, match="is not empty and not a teacher cache"):
        cache.check()
    with pytest.raises(OutputError, match="is a file"):
        replace(cache, folder=cache.folder / "thesis.txt").check()


def test_a_cache_of_other_tokens_or_with_a_damaged_file_is_refused_unloaded(cache, corpora, load, tmp_path):
    cache.fill(corpora[6], load)
    before, text, place = files(cache), tiny.text(), 5 * LENGTH + 3  # in the last window of the last file
    one_token = f"{text[:place]}#{text[place + 1 :]}"
    for number, (other, length) in enumerate(((tiny.text(seed=1), LENGTH), (text, LENGTH - 1), (one_token, LENGTH))):
        (tmp_path / "other.txt").write_text(other)
        tokens = tmp_path / f"tokens{number}"
        corpus = Corpus.collect(tiny.tokenizer(), str(tmp_path / "other.txt"), length, 9, 1, tokens)
        with pytest.raises(DataError, match=r"to other tokens than .*other.txt: choose another `cache_teacher`"):
            cache.fill(corpus, load)
        assert (load.call_count, files(cache)) == (1, before)
    (cache.folder / SECOND_FILE).write_bytes(b"half a file")
    with pytest.raises(DataError, match=rf"{SECOND_FILE} cannot be read"):
        replace(cache).fill(corpora[6], load)


def test_tokens_beyond_sixteen_bits_are_stored(cache, corpora):
    model = tiny.build(tiny.VARIANTS[NAME], vocab_size=2**16 + 40)
    with torch.no_grad():
        model.get_output_embeddings().weight[: 2**16] *= 0.1  # the last tokens are the most likely
    cache.fill(corpora[6], lambda: tiny.runtime(model))
    check_windows(cache, corpora[6], model, [0, 5])
    assert cache.distribution(ids_of(corpora[6], [0]), torch.tensor([0])).ids.long().max() >= 2**16
