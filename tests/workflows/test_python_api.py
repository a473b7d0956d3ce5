"""Workflows as Python functions: models and texts in memory give the same results as those in files."""

import inspect
import json
import re
import tempfile
from dataclasses import replace
from unittest.mock import Mock

import numpy
import pytest
import torch
from pandas import DataFrame, Series
from peft import LoraConfig, get_peft_model

import slimstate
import tiny
from recoveries import Listener
from slimstate import EvalConfig, PruneConfig, RecoverConfig, Selector, workflows
from slimstate.benchmark.options import CalibrateBenchConfig
from slimstate.cli.commands import OutputFlags
from slimstate.records.evaluation import EvaluationRecord
from slimstate.records.folder import read_records
from slimstate.selectors import best_of
from slimstate.system.errors import DataError, ModelError, OutputError, PlanError
from slimstate.system.interruption import STOP
from slimstate.system.options import Options, options_of
from slimstate.workflows.evaluate import evaluated
from slimstate.workflows.options import InspectConfig, ReconstructConfig, SweepConfig, VerifyConfig

pytestmark = pytest.mark.slow
NAME = "delta_net-plain"
SHORT = {"samples": 4, "length": 64}
ADAPTER = LoraConfig(target_modules=["0"])
CHATS = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
TEXTS = [tiny.text()[place : place + 400] for place in range(0, 4000, 400)]
TOO_FEW = Selector(name="short", needs={"weight"}, choose=best_of(lambda case, request: case.key_weight.sum(-1)[:1]))


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return tiny.build(tiny.VARIANTS[NAME])


@pytest.fixture(autouse=True)
def temporary(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch):
    """Nothing of a model in memory is left in the folder for temporary files, also after an error."""
    place = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    yield
    assert not list(place.iterdir()), "a temporary folder was left"


def test_a_model_and_a_text_in_memory_keep_the_channels_that_files_keep(model, tmp_path):
    tiny.save(model, tmp_path / "model")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    options = {"key_dim": 8, "progress": False, **SHORT}
    from_files = slimstate.prune(tmp_path / "model", tmp_path / "cut", data=rows, **options)
    stored = type(model).from_pretrained(tmp_path / "cut")
    for data in (TEXTS, iter(TEXTS), Series(TEXTS), [{"text": text} for text in TEXTS]):
        cut = slimstate.prune(model, tokenizer=tiny.tokenizer(), data=data, **options)
        assert cut.path is None
        for layer, selection in from_files.plan.selections.items():
            assert torch.equal(cut.plan.selections[layer].keep, selection.keep)
        ids = tiny.token_ids()
        assert torch.equal(cut.cut_model(ids).logits, stored(ids).logits)
    twice = slimstate.prune(cut.cut_model, method="l1", key_dim=4, progress=False)
    assert twice.cut_model.config.slimstate["history"][0]["key_dim"] == 8


class Loudest(Selector):
    """Keeps the channels whose keys have the largest sum of squares, to a power."""

    def __init__(self, power: float) -> None:
        def score(case, request):
            return case.evidence.key_gram.diagonal(dim1=-2, dim2=-1) ** power

        super().__init__(name="loudest", needs={"gram"}, choose=best_of(score))


def test_a_selector_of_your_own_chooses_from_a_list_of_strings(model):
    options = {"tokenizer": tiny.tokenizer(), "data": TEXTS, "progress": False}
    cut = slimstate.prune(model, method=Loudest(2.0), compression=0.5, **options)
    assert (cut.method, cut.key_dim) == ("loudest", 16), "half of 24 channels, rounded to a multiple of 16"
    with pytest.raises(PlanError, match="`needs` of mine has luck"):
        Selector(name="mine", needs={"luck"}, choose=list)
    other = slimstate.prune(model, method=Loudest(1.0), key_dim=16, **options)
    for layer, selection in other.plan.selections.items():
        assert torch.equal(selection.keep, cut.plan.selections[layer].keep), "a power keeps the order"


def test_chats_are_read_with_the_template_of_the_tokenizer(model, tmp_path):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = CHATS
    chats = [[{"role": "user", "content": text}, {"role": "assistant", "content": "Yes."}] for text in TEXTS]
    plain = [f"user: {text}\nassistant: Yes.\n" for text in TEXTS]
    lines = tmp_path / "chats.jsonl"
    lines.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    forms = (plain, chats, [{"messages": chat} for chat in chats], lines)
    records = [slimstate.evaluate(model, text, tokenizer=tokenizer, length=64, progress=False) for text in forms]
    assert len({(record.digest, record.perplexity) for record in records}) == 1
    one = slimstate.evaluate(model, chats[0], tokenizer=tokenizer, length=16, progress=False)
    assert one.text == "1 text in memory"
    with pytest.raises(DataError, match="no chat template"):
        slimstate.evaluate(model, chats, tokenizer=tiny.tokenizer(), progress=False)


def test_every_workflow_takes_models_in_memory(model, tmp_path):
    texts = {"tokenizer": tiny.tokenizer(), "progress": False}
    assert slimstate.inspect(model).model.endswith("(in memory)")
    record = slimstate.prune(model, method="l1", key_dim=8, progress=False)
    record.plan.write(tmp_path / "plan.json")
    cut = record.cut_model
    measured = {"eval_text": TEXTS, "eval_tokens": 512}
    again = slimstate.prune(model, tmp_path / "cut", apply=tmp_path / "plan.json", **measured, **texts)
    assert (again.path, again.evaluation.cut.reconstructed) == (tmp_path / "cut", ())
    assert slimstate.estimate(model, method="l1", compression=0.5, **texts).key_dim == 16
    evaluated = slimstate.evaluate(cut, TEXTS, baseline=model, length=64, max_tokens=256, **texts)
    assert evaluated.baseline is not None
    assert evaluated.perplexity != evaluated.baseline.perplexity
    grid = {"methods": ("l1",), "key_dims": (8,), "text_length": 64, "max_tokens": 256}
    swept = slimstate.sweep(model, tmp_path / "sweep", text=TEXTS, **grid, **texts)
    assert swept.rows[0].perplexity == pytest.approx(evaluated.perplexity, rel=1e-4)
    analysis = slimstate.analyze(model, TEXTS, tmp_path / "states", length=64, every=16, skip=16, **texts)
    assert analysis.models[0].key_dim == 24
    quick = {"steps": 2, "samples": 10, "length": 32, "batch": 2}
    better = slimstate.reconstruct(cut, tmp_path / "better", data=TEXTS, teacher=model, **quick, **texts)
    assert better.path == tmp_path / "better"
    quick = {"steps": 2, "batch_size": 2, "length": 32, "report_to": "none"}
    recovered = slimstate.recover(cut, tmp_path / "recovered", data=TEXTS, teacher=model, **quick, **texts)
    assert recovered.path == tmp_path / "recovered"
    assert recovered.corpus.data == "10 texts in memory"
    assert len(recovered.to_dataframe()) == len(recovered.log)
    assert slimstate.report(tmp_path, progress=False).path == tmp_path / "report.html"


@pytest.fixture
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.txt"
    path.write_text(" = Heading = \n" + tiny.text(6000, seed=3))  # WikiText, which has a word perplexity
    return path


def test_results_are_measured_beside_the_uncut_model_by_evaluate(folders, text_file, page, tmp_path, succeed, refusal):
    model, slim, better = folders[NAME], tmp_path / "slim", tmp_path / "better"
    words = ("prune", model, "--key-dim", 8, "--data", text_file, "--reconstruct", "--reconstruct-steps", 1)
    words += ("--reconstruct-samples", 4, "--reconstruct-length", 32, "--eval-text", page, "--out", slim)
    (short := page.with_name("short.txt")).write_text("Short.")
    assert "tokens, fewer than a window of 1024: use --eval-tokens" in refusal(*words, "--eval-text", short)
    assert not list(tmp_path.iterdir()), "the text is read before the work"
    printed = succeed(*words, "--eval-tokens", 1100).splitlines()
    options = {"steps": 1, "samples": 4, "length": 32, "eval_text": text_file, "eval_tokens": 1100, "progress": False}
    record = slimstate.reconstruct(slim, better, data=page, **options)
    per_token = ["perplexity", "bits per byte"]  # beside the word perplexity of one page, which has no error
    for out, text, units in ((slim, page, [*per_token, "word perplexity"]), (better, text_file, per_token)):
        both = {"baseline": model, "associative": True, "max_tokens": 1100, "progress": False}
        measured, written = slimstate.evaluate(out, text, **both), EvaluationRecord.read(out / EvaluationRecord.FILE)
        run = {name: getattr(written, name) for name in ("seconds", "config", "command")}
        assert replace(measured, **run) == written
        rows, card = list(written.comparison(main=True)), (out / "README.md").read_text()
        assert sorted(name for name, *_ in rows) == sorted([*units, "associative recall"])
        assert all(f"| {name} | {before} | {after} | {share} |" in card for name, after, before, share in rows)
        assert out == better or all(line in printed for line in written.summary())
    assert record.evaluation == replace(written, out=record.evaluation.out)
    for out in (slim, better):  # before this reconstruction, and after it
        assert card.count(f"| | uncut | {out.name} | share kept |") == card.count(f"## Measured: {out.name}\n") == 1
    assert (f"\n# {better.name}: " in card, f"# {slim.name}: " in card) == (True, False)
    assert card.count(f'from_pretrained("{better.name}")') == card.count("from_pretrained(") > 0
    slimstate.prune(better, tmp_path / "again", method="l1", key_dim=4, progress=False)
    assert read_records(tmp_path).counts()["evaluation"] == 2, "the cut of a measured model has no copy"


def test_a_stop_during_the_measurement_says_how_to_measure(folders, page, tmp_path, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt(STOP._message())

    monkeypatch.setitem(evaluated.__globals__, "evaluate", stop)
    model, out = folders[NAME], tmp_path / "slim"
    command = f"slimstate eval {out} --text {page} --out {out / EvaluationRecord.FILE}"
    command += f" --associative --baseline {model} --max-tokens 1100"
    with pytest.raises(
        KeyboardInterrupt, match=re.escape(f"{out}: written, and complete, but not measured")
    ) as stopped:
        slimstate.prune(model, out, method="l1", key_dim=8, eval_text=str(page), eval_tokens=1100, progress=False)
    assert str(stopped.value).endswith(f"to measure it: {command}")
    assert (out / "config.json").exists()


def test_a_model_whose_measurement_fails_is_complete_and_claims_nothing(folders, page, tmp_path, monkeypatch):
    monkeypatch.setattr("slimstate.evaluation.measure.associative_recall", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        slimstate.prune(folders[NAME], tmp_path / "slim", method="l1", key_dim=8, eval_text=page, progress=False)
    assert slimstate.inspect(tmp_path / "slim").key_dim == 8
    assert "Measured" not in (tmp_path / "slim" / "README.md").read_text()
    assert not (tmp_path / "slim" / EvaluationRecord.FILE).exists()


@pytest.mark.parametrize(("change", "message"), [
    ({"model": 7}, "got int"),
    ({"model": "FOLDER", "tokenizer": tiny.tokenizer()}, "has its own tokenizer: leave out `tokenizer`"),
    ({"model": torch.nn.Linear(2, 2)}, "must be a transformers model, got Linear"),
    ({"model": get_peft_model(torch.nn.Sequential(torch.nn.Linear(2, 2)), ADAPTER)}, r"model\.merge_and_unload\(\)"),
    ({"model": torch.compile(torch.nn.Linear(2, 2))}, r"give the model as it was before torch\.compile"),
    ({"model": torch.nn.Sequential(torch.compile(torch.nn.Linear(2, 2)))}, r"as it was before torch\.compile"),
    ({"data": "a text\nof two lines"}, r"give text itself as a list of strings, \[text\]"),
    ({"data": 3}, "must be a path, or a list of strings or chats, got int"),
    ({"data": DataFrame({"text": ["a"]})}, r"give the column of the table that has the text, such as table\['text'\]"),
    ({"data": [1, 2], "tokenizer": tiny.tokenizer()}, "text 1 of 2 texts in memory"),
    ({"data": ["text"]}, "give the `tokenizer` of the model in memory"),
    ({"model": "FOLDER", "data": ["hi"]}, r"gives \d tokens to calibrate on; at least 24 are needed"),
    ({"method": "best"}, "unknown method 'best'"),
    ({"method": 3}, "`method` must be the name of a selector or a Selector, got 3"),
    ({"method": Selector(name="l1", needs={"weight"}, choose=list)}, "a method l1 exists already"),
    ({"method": TOO_FEW}, "the selector short returned"),
    ({"tokenizer": "words"}, "must be a tokenizer of transformers"),
    ({"method": "l1", "key_dim": 999}, "`key_dim` must be at least 1 and less than the width 24, got 999"),
    ({"method": "l1", "key_dim": "8"}, "`key_dim` must be a whole number, got '8'"),
    ({"model": "no model", "key_dim": 8.0}, "`key_dim` must be a whole number, got 8.0"),
    ({"method": "l1", "key_dim": None}, "give either `key_dim` or `compression`"),
    ({"method": "l1", "eval_text": TEXTS}, "`eval_text` measures what is written: give `out`"),
    ({"model": "FOLDER", "data": TEXTS, "reconstruct": True}, "`reconstruct` trains what is written: give `out`"),
    ({"config": slimstate.ReconstructOptions()}, "the config must be a PruneConfig, got ReconstructOptions"),
])  # fmt: skip
def test_errors_name_parameters_of_python(model, change, message, folders):
    options = {"model": model, "method": "drrqr", "key_dim": 8, **change}
    options["model"] = folders[NAME] if options["model"] == "FOLDER" else options["model"]
    with pytest.raises((ModelError, DataError, PlanError), match=message):
        slimstate.prune(options.pop("model"), progress=False, **options)


@pytest.mark.parametrize(("config", "values", "message"), [
    (PruneConfig, {"apply": "plan", "method": "l1"}, "`method` is part of the plan of `apply`"),
    (PruneConfig, {"apply": "plan", "data": "x.txt"}, "`data` is part of the plan of `apply`"),
    (PruneConfig, {"key_dim": 8, "state_dtype": "bf16"}, "`state_dtype` needs a budget"),
    (PruneConfig, {"eval_tokens": 8}, "`eval_tokens` needs `eval_text`"),
    (ReconstructConfig, {"eval_tokens": 8}, "`eval_tokens` needs `eval_text`"),
    (EvalConfig, {"limit": 8}, "`limit` needs `tasks` or `recall`"),
    (EvalConfig, {"state_every": 8}, "`state_every` needs another `state_dtype`"),
    (EvalConfig, {"seed": 8}, "`seed` needs `associative`, `tasks` or `recall`"),
    (RecoverConfig, {"no_teacher": True, "temperature": 1.0}, "`temperature` needs a teacher"),
    (RecoverConfig, {"cache_top_k": 8}, "`cache_top_k` needs `cache_teacher`"),
    (InspectConfig, {"engine": "vllm", "context": 8, "memory_gb": 1, "sequences": 2}, "`sequences` has no effect"),
    (InspectConfig, {"engine": "vllm", "kv_dtype": "fp8"}, "`kv_dtype` is for the memory of a serving engine"),
    (SweepConfig, {"limit": 8}, "`limit` needs `tasks`"),
    (SweepConfig, {"samples": 8}, "`samples` needs `data`"),
    (SweepConfig, {"value_method": "l1"}, "`value_method` needs `value_dims`"),
    (SweepConfig, {"state_every": 8}, "`state_every` needs another of `state_dtypes`"),
    (SweepConfig, {"data": "x", "reconstruct_steps": 0, "reconstruct": True, "reconstruct_learning_rate": 0.1},
     "`reconstruct_learning_rate` needs `reconstruct_steps` above 0"),
    (VerifyConfig, {"engine": "mlx", "gguf_type": "q8_0"}, "`gguf_type` is for `engine` llama.cpp"),
    (VerifyConfig, {"engine": "mlx", "engine_settings": '{"a": 1}'}, "`engine_settings` is for `engine` llama"),
    (CalibrateBenchConfig, {"documents": "lines"}, "`documents` needs `data`"),
    (OutputFlags, {"quiet": True, "verbose": True}, "either `quiet` or `verbose`"),
])  # fmt: skip
def test_an_option_without_effect_is_refused(config, values, message):
    with pytest.raises(PlanError, match=message):
        config.from_values(values)


def test_windows_of_calibration_and_options_of_other_methods_are_not_ignored(folders, text_file, tmp_path):
    with pytest.raises(PlanError, match="`samples` has no effect: layers are calibrated on the windows of `reconst"):
        slimstate.prune(folders[NAME], tmp_path / "cut", samples=32, data=text_file, reconstruct=True, key_dim=8)
    listener = Listener()
    unused = {"data": text_file, "samples": 4, "rrqr_f": 2.0, "documents": "lines", "seed": 3, "progress": listener}
    slimstate.prune(folders[NAME], method="l1", key_dim=8, **unused)
    assert "no effect with l1: `rrqr_f`, `samples`, `data`, `documents`, `seed`" in listener.lines
    slimstate.prune(folders[NAME], method="random", score="q", value_method="l1", value_dim=8, progress=listener)
    assert "no effect with l1 for values alone: `score`, `method`" in listener.lines
    slimstate.prune(folders["mamba2-plain"], method="l1", key_dim=8, keep_norm_eps=True, progress=listener)
    assert "no effect with mamba2: `keep_norm_eps`" in listener.lines
    options = {"method": "l1", "key_dim": numpy.int64(8), "device": "cpu", "progress": listener}
    slimstate.prune(folders[NAME], tmp_path / "cut", **options)
    assert "no effect with l1: `device`" in listener.lines
    slimstate.prune(folders[NAME], apply=tmp_path / "cut", dtype="float32", progress=listener)
    assert "no effect with `apply`, which runs no model: `dtype`" in listener.lines
    slimstate.prune(folders["qwen3_next-plain"], method="l1", key_dim=8, engine="llama.cpp", progress=listener)
    assert "key dim 8 of 24, value dim 8 of 12: llama.cpp needs as many values as keys" in listener.lines
    slimstate.prune(folders[NAME], key_dim=8, data=TEXTS[:1], samples=2, length=64, progress=listener)
    assert any("gives 128 tokens to calibrate on; with fewer than 384, 16 for" in line for line in listener.lines)
    with pytest.raises(PlanError, match="`score` must be a function of the model and its tokenizer: too many"):
        slimstate.sweep(folders[NAME], tmp_path / "sweep", text=text_file, score=lambda model: 1.0)
    with pytest.raises(PlanError, match="`max_length` needs `tasks`, `recall` or WikiText"):
        slimstate.evaluate(folders[NAME], text_file, max_length=8)


def test_results_print_well_and_become_tables(folders, tmp_path, capsys):
    record = slimstate.inspect(folders[NAME])
    assert "key dim 24" in str(record)
    assert list(record.to_dataframe()["key_dim"]) == [option.key_dim for option in record.options]
    cut = slimstate.prune(folders[NAME], tmp_path / "cut", method="l1", key_dim=8)
    assert "key dim 8 of 24" in capsys.readouterr().err
    slimstate.prune(folders[NAME], method="l1", key_dim=8, progress=False)
    assert capsys.readouterr().err == ""
    frame = cut.to_dataframe()
    assert len(frame) == sum(len(choice.keep) for choice in cut.plan.selections.values())
    assert frame["keep"][0] == cut.plan.selections[0].keep[0].tolist()
    assert f"written to {tmp_path / 'cut'}" in str(cut)
    assert cut.to_dict() == cut.to_json()
    assert "<table" in cut._repr_html_()
    assert str(cut).count("\n") < 60


@pytest.mark.parametrize("name", [name for name in slimstate.__all__ if name != "__version__"])
def test_every_public_name_is_documented(name):
    """Options say what they are; functions describe their own parameters and show an example."""
    value = getattr(slimstate, name)
    text = inspect.getdoc(value) or ""
    if inspect.isclass(value) and issubclass(value, Options):
        assert text
        assert all(option.help for option in options_of(value))
        return
    assert "Example" in text
    parameters = [] if inspect.isclass(value) else inspect.signature(value).parameters
    text += workflows.__doc__ or ""
    missing = [parameter for parameter in parameters if f"`{parameter}`" not in text and f"{parameter}:" not in text]
    assert not missing, f"{name} does not describe {', '.join(missing)}"


@pytest.mark.parametrize("bad", [7, b"x", ["x"], "a\0b"])
def test_what_is_no_path_is_refused_in_one_line(bad, folders, text_file):
    model = folders["delta_net-plain"]
    text, read = {"data": text_file}, {"text": text_file}
    for call in (
        lambda: slimstate.prune(model, bad, method="l1", key_dim=8),
        lambda: slimstate.estimate(model, bad, method="l1", key_dim=8),
        lambda: slimstate.reconstruct(model, bad, **text),
        lambda: slimstate.recover(model, bad, no_teacher=True, **text),
        lambda: slimstate.train(model, bad, **text),
        lambda: slimstate.evaluate(model, text_file, out=bad),
        lambda: slimstate.analyze(model, text_file, bad),
        lambda: slimstate.sweep(model, bad, **read),
        lambda: slimstate.verify(model, engine="transformers", out=bad),
        lambda: slimstate.bench_mixer(out=bad),
        lambda: slimstate.report(".", bad),
        lambda: slimstate.recover(model, "out", cache_teacher=bad, **text),
    ):
        with pytest.raises(PlanError, match=r"^`(out|cache_teacher)` must be a path, got [^\n]*$"):
            call()
    for call in (lambda: slimstate.report(bad), lambda: slimstate.verify(bad, engine="transformers")):
        with pytest.raises(PlanError, match="must be a path"):
            call()
    for call in (lambda: slimstate.analyze(7, text_file, "out"), lambda: slimstate.prune(7, "out", key_dim=8)):
        with pytest.raises(ModelError, match="must be a folder, a hub id or a transformers model, got int"):
            call()


def test_an_output_is_checked_before_a_verification(folders, tmp_path):
    (tmp_path / "mine.json").write_text("{}")
    with pytest.raises(OutputError, match="is not a slimstate record"):
        slimstate.verify(folders["delta_net-plain"], engine="transformers", out=tmp_path / "mine.json")
    with pytest.raises(OutputError, match="is a folder"):
        slimstate.verify(folders["delta_net-plain"], engine="transformers", out=tmp_path)
