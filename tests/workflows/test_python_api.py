"""The verbs as Python functions: what is in memory gives what the same in files gives."""

from __future__ import annotations

import inspect
import json
import os
import tempfile
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import torch

import slimstate
import tiny
from slimstate import Calibration, CutOptions, ReconstructOptions, Selector
from slimstate.selectors import best_of
from slimstate.system.errors import DataError, ModelError, PlanError

NAME = "delta_net-plain"
SHORT = {"samples": 4, "length": 64}
CHATS = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return tiny.build(tiny.VARIANTS[NAME])


@pytest.fixture(autouse=True)
def temporary(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders lie, to see that they go."""
    place = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    yield place
    assert not list(place.iterdir()), "a temporary folder was left"


def texts() -> list[str]:
    return [tiny.text()[place : place + 400] for place in range(0, 4000, 400)]


@pytest.mark.slow
def test_a_model_in_memory_keeps_the_channels_that_its_folder_keeps(model, tmp_path):
    tiny.save(model, tmp_path / "model")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts()))
    asked = {"key_dim": 8, "progress": False}
    in_files = slimstate.prune(
        tmp_path / "model", tmp_path / "a", calibration=Calibration(data=str(rows), **SHORT), **asked
    )
    for given in (texts(), (text for text in texts()), [{"text": text} for text in texts()]):
        calibration = Calibration(data=given, **SHORT)
        found = slimstate.prune(model, tokenizer=tiny.tokenizer(), calibration=calibration, **asked)
        assert found.path is None
        for layer, selection in in_files.plan.selections.items():
            assert torch.equal(found.plan.selections[layer].keep, selection.keep)
        ids = tiny.token_ids(found.cut_model.config.vocab_size)
        stored = type(model).from_pretrained(tmp_path / "a")
        assert torch.equal(found.cut_model(ids).logits, stored(ids).logits)


def test_a_plain_list_of_strings_and_a_selector_of_ones_own_are_enough(model):
    class Loudest(Selector):
        def __init__(self, power: float) -> None:
            def score(case, request):
                return case.evidence.key_gram.diagonal(dim1=-2, dim2=-1) ** power

            super().__init__(name="loudest", needs={"gram"}, choose=best_of(score))

    cut = slimstate.prune(
        model, tokenizer=tiny.tokenizer(), method=Loudest(2.0), progress=False,
        data=texts(),
    )  # fmt: skip
    assert (cut.method, cut.key_dim) == ("loudest", 16), "half of 24 channels, a multiple of 16"
    plan = slimstate.prune(
        model, tokenizer=tiny.tokenizer(), method=Loudest(1.0), key_dim=16, progress=False,
        data=texts(),
    )  # fmt: skip
    for layer, selection in plan.selections.items():
        assert torch.equal(selection.keep, cut.plan.selections[layer].keep), "a power keeps the order"


@pytest.mark.slow
def test_chats_are_read_in_the_words_of_the_template(model, tmp_path):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = CHATS
    chats = [[{"role": "user", "content": text}, {"role": "assistant", "content": "Yes."}] for text in texts()]
    plain = [f"user: {text}\nassistant: Yes.\n" for text in texts()]
    lines = tmp_path / "chats.jsonl"
    lines.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    found = [
        slimstate.evaluate(model, given, tokenizer=tokenizer, length=64, progress=False)
        for given in (plain, chats, [{"messages": chat} for chat in chats], lines)
    ]
    assert len({record.digest for record in found}) == 1
    assert len({record.perplexity for record in found}) == 1
    one = slimstate.evaluate(model, chats[0], tokenizer=tokenizer, length=16, progress=False)
    assert one.text == "1 text in memory"
    with pytest.raises(DataError, match="no chat template"):
        slimstate.evaluate(model, chats, tokenizer=tiny.tokenizer(), progress=False)


@pytest.mark.slow
def test_every_verb_takes_a_model_in_memory(model, tmp_path):
    words, quick = tiny.tokenizer(), {"length": 64, "max_tokens": 256}
    assert slimstate.inspect(model).model.endswith("(in memory)")
    plan = slimstate.prune(model, method="l1", key_dim=8, progress=False)
    plan.plan.write(tmp_path / "plan.json")
    again = slimstate.prune(model, tmp_path / "cut", apply=tmp_path / "plan.json", progress=False)
    assert again.path == tmp_path / "cut"
    assert slimstate.estimate(model, method="l1", progress=False).key_dim == 16
    cut = slimstate.prune(model, method="l1", key_dim=8, progress=False).cut_model
    beside = slimstate.evaluate(cut, texts(), baseline=model, tokenizer=words, **quick, progress=False)
    assert beside.baseline is not None
    assert beside.perplexity != beside.baseline.perplexity
    swept = slimstate.sweep(
        model, tmp_path / "sweep", text=texts(), tokenizer=words, methods="l1", key_dims=(8,), progress=False,
        text_length=64, max_tokens=256,
    )  # fmt: skip
    assert swept.rows[0].perplexity == pytest.approx(beside.perplexity, rel=1e-4)
    looked = slimstate.analyze(
        model, texts(), tmp_path / "states", tokenizer=words, length=64, every=16, skip=16, progress=False
    )
    assert looked.models[0].key_dim == 24
    better = slimstate.reconstruct(
        cut, tmp_path / "better", data=texts(), teacher=model, tokenizer=words, progress=False,
        training=ReconstructOptions(steps=2, batch=2, samples=10, length=32),
    )  # fmt: skip
    assert better.path == tmp_path / "better"
    assert slimstate.report(tmp_path, progress=False).path == tmp_path / "report.html"


@pytest.mark.slow
def test_recovery_takes_student_and_teacher_from_memory(model, tmp_path):
    cut = slimstate.prune(model, method="l1", key_dim=8, progress=False).cut_model
    found = slimstate.recover(
        cut, tmp_path / "out", data=texts(), teacher=model, tokenizer=tiny.tokenizer(), steps=2, batch_size=2,
        length=32, report_to="none", progress=False,
    )  # fmt: skip
    assert found.path == tmp_path / "out"
    assert found.corpus.data == "10 texts in memory"
    assert len(found.to_dataframe()) == len(found.log)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model": 7}, "int is no model"),
        ({"model": torch.nn.Linear(2, 2)}, "Linear has no save_pretrained"),
        ({"calibration": "a text\nof two lines"}, r"give text itself as a list of strings, \[text\]"),
        ({"calibration": 3}, "must be a path, or a list of strings or chats, got int"),
        ({"calibration": [1, 2], "tokenizer": "own"}, "text 1 of 2 texts in memory must be a string, a chat, .* got 1"),
        ({"calibration": ["text"]}, "give the `tokenizer` of the model in memory"),
        ({"method": "best"}, "unknown method 'best'"),
        ({"method": 3}, "`method` is the name of a selector or a Selector"),
        ({"method": Selector(name="l1", needs={"weight"}, choose=list)}, "there is a method l1 already"),
        ({"tokenizer": "words"}, "must be a tokenizer of transformers"),
    ],
)
def test_errors_name_parameters_of_python(model, given, words):
    given = {"model": model, "method": "drrqr", **given}
    if given.get("tokenizer") == "own":
        given["tokenizer"] = tiny.tokenizer()
    with pytest.raises((ModelError, DataError, PlanError), match=words):
        slimstate.prune(given.pop("model"), progress=False, **given)


def test_a_tokenizer_beside_a_folder_is_refused(folders):
    with pytest.raises(PlanError, match="has its own tokenizer: leave out `tokenizer`"):
        slimstate.prune(folders[NAME], method="l1", tokenizer=tiny.tokenizer(), progress=False)


def test_an_unknown_need_of_a_selector_is_named():
    with pytest.raises(PlanError, match="`needs` of mine has luck"):
        Selector(name="mine", needs={"luck"}, choose=list)


def test_a_selector_that_keeps_too_few_is_named(model):
    short = Selector(name="short", needs={"weight"}, choose=best_of(lambda case, request: case.key_weight.sum(-1)[:1]))
    with pytest.raises(PlanError, match="the selector short returned"):
        slimstate.prune(model, method=short, key_dim=8, progress=False)


def test_results_print_well_and_become_tables(folders, tmp_path):
    found = slimstate.inspect(folders[NAME])
    assert "key dim 24" in str(found)
    assert list(found.to_dataframe()["key_dim"]) == [option.key_dim for option in found.options]
    cut = slimstate.prune(folders[NAME], tmp_path / "cut", method="l1", key_dim=8, progress=False)
    frame = cut.to_dataframe()
    assert len(frame) == sum(len(choice.keep) for choice in cut.plan.selections.values())
    assert frame["keep"][0] == cut.plan.selections[0].keep[0].tolist()
    assert f"written to {tmp_path / 'cut'}" in str(cut)
    assert cut.to_dict() == cut.to_json()
    assert "<table" in cut._repr_html_()
    assert str(cut).count("\n") < 60


def test_progress_is_shown_unless_it_is_switched_off(folders, capsys):
    for progress, spoken in ((True, True), (False, False)):
        slimstate.prune(folders[NAME], method="l1", key_dim=8, progress=progress)
        said = capsys.readouterr().err
        assert ("key dim 8 of 24" in said) is spoken


@pytest.mark.parametrize("name", [name for name in slimstate.__all__ if name != "__version__"])
def test_every_public_name_says_what_it_takes_and_shows_an_example(name):
    value = getattr(slimstate, name)
    told = inspect.getdoc(value) or ""
    assert "Example" in told, name
    if is_dataclass(value):
        given = [item.name for item in fields(value) if item.init]
    elif inspect.isclass(value):
        given = []
    else:
        given = list(inspect.signature(value).parameters)
    missing = [parameter for parameter in given if f"`{parameter}`" not in told and f"{parameter}:" not in told]
    assert not missing, f"{name} says nothing of {', '.join(missing)}"


def test_nothing_of_a_model_in_memory_is_left_where_a_verb_fails(model, temporary):
    with pytest.raises(PlanError):
        slimstate.prune(model, method="l1", key_dim=999, progress=False)
    assert not os.listdir(temporary)


def test_a_cut_of_a_cut_in_memory_says_what_was_done_before(model):
    once = slimstate.prune(model, method="l1", key_dim=16, progress=False)
    twice = slimstate.prune(once.cut_model, method="l1", key_dim=8, options=CutOptions(), progress=False)
    assert twice.cut_model.config.slimstate["history"][0]["key_dim"] == 16
