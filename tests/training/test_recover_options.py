"""Options of a recovery: defaults, the preset, dry runs, and bad input that is refused in one line."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest

import slimstate
import tiny
from launching import options as flags
from recoveries import ALONE, BRIEF, GATED, NAME, PAPER, PARTS, SHORT, TIED, confident, record_of
from slimstate.checkpoints.reader import Checkpoint
from slimstate.cli import name_flags
from slimstate.records.schema import from_json
from slimstate.records.training import TrainSettings
from slimstate.system.errors import DataError, ModelError, OutputError, PlanError
from slimstate.training import options
from slimstate.training.adaptation import adaptation_of, rate_for, resolve
from slimstate.training.recover import Preview
from slimstate.workflows.options import PRESETS, RecoverConfig

pytestmark = pytest.mark.slow
DRY_RUNS = (
    (NAME, {"lora_rank": 5}, None), (GATED, {"lora": True}, GATED), (NAME, {"lora_targets": "all-linear"}, None),
    (GATED, {"lora_targets": "all-linear", "tokens": 700, "steps": None}, None), (GATED, PAPER, "paper"),
    (NAME, {}, "full"), (NAME, {"mixers": True}, None), (TIED[1], {"full": True}, TIED[1]),
)  # fmt: skip
OUT_OF_RANGE = [
    ("cache_top_k", 0), ("lora_rank", 0), ("lora_alpha", 0), ("batch_size", 0), ("steps", 0), ("length", 1),
    ("grad_accum", 0), ("save_every", 0), ("eval_tokens", 1), ("lr", -1e-4), ("min_lr", -1e-3), ("warm_up", 1.0),
    ("temperature", 0.0), ("kd_weight", -1.0), ("lr", math.nan), ("lr", math.inf), ("temperature", math.inf),
]  # fmt: skip
EXTRA = r"pip install 'slimstate\[recover\]'"
MISSING = (
    ("peft", {"lora": True}, f"{EXTRA}$"), ("accelerate", {}, f"{EXTRA}$"), ("peft", {"full": True}, None),
    ("tensorboard", {"report_to": "tensorboard"}, f"{EXTRA}, or `report_to` none$"),
    ("wandb", {"report_to": "tensorboard, wandb"}, "pip install wandb, or `report_to` none$"),
)  # fmt: skip


def config(**values) -> RecoverConfig:
    return RecoverConfig.from_values(values)


@pytest.mark.parametrize(("width", "rate"), [(64, 5e-4), (512, 5e-4), (640, 4e-4), (1024, 2.5e-4)])
def test_the_learning_rate_is_inversely_proportional_to_a_width_above_512(width, rate, tmp_path):
    model = tiny.build(tiny.VARIANTS[NAME], hidden_size=width, intermediate_size=32, num_hidden_layers=1)
    student = Checkpoint.open(tiny.save(model, tmp_path / "model"))
    assert rate_for(student) == pytest.approx(rate)
    for source in (config(), config(lora=True)):
        resolved = resolve(source, student)
        assert (resolved.lr, resolved.min_lr) == (rate_for(student), pytest.approx(rate / 20))
        assert (resolved.adaptation.full, resolved.adaptation.mixers) == (not source.adaptation.lora, False)
        assert resolve(resolved, student) == resolved
    assert resolve(config(lr=1e-3), student).min_lr == pytest.approx(5e-5)
    assert resolve(config(min_lr=0.0), student).min_lr == 0
    with pytest.raises(PlanError, match=r"`min_lr` must be at most the learning rate .*, got 0.00051"):
        resolve(config(min_lr=5.1e-4), student)
    assert resolve(config(preset="paper"), student) == config(preset="paper") == RecoverConfig(preset="paper")


def test_explicit_options_override_the_preset(pairs, monkeypatch, execute, refusal):
    """The preset is what the paper and its code say. Options count although they are the usual defaults."""

    def dry_run(*words: object) -> Preview:
        uncut, cut = pairs[GATED]
        code, out, err = execute("recover", cut, "--teacher", uncut, "--dry-run", "--json", *words)
        assert (code, err) == (0, "")
        return from_json(Preview, json.loads(out))

    paper = dry_run("--preset", "paper")
    assert paper == slimstate.preview(pairs[GATED][1], teacher=pairs[GATED][0], preset="paper", progress=False)
    assert {name.rpartition(".")[2] for name in paper.targets} == {"q_proj", "k_proj", "v_proj"}
    norms = {"attn_norm", "mlp_norm", "o_norm", "norm", "dt_bias"}
    assert {name.rpartition(".")[2] for name in paper.unfrozen} == norms
    assert paper.settings == TrainSettings(
        adaptation=paper.settings.adaptation, steps=2000, batch_size=16, length=2048, lr=1e-4, min_lr=1e-5,
        warm_up=0.05, seed=0, dtype="float32", kd_weight=1.0, temperature=2.0, full=False, mixers=False, lora_rank=16,
        lora_alpha=32, weight_decay=0.1, second_beta=0.95, adam_eps=1e-15, **PAPER,
    )  # fmt: skip
    default = dry_run()
    assert (default.unfrozen, default.targets, default.settings.full) == ((), (), True)
    assert dry_run("--lora-rank", 16) == dry_run("--lora") != default
    for option in (("--lora",), ("--lora-targets", "q_proj"), ("--unfreeze", "norms"), ("--lora-alpha", 5)):
        adapted = dry_run(*option)  # any option of adapters selects adapters
        assert (adapted.settings.full, adapted.settings.mixers, adapted.targets == ()) == (False, False, False)
    assert dry_run("--lora-alpha", 32, "--full") == default
    mine = dry_run("--preset", "paper", "--lora-targets", "q_proj", "--lr", "3e-4", "--kd-weight", "4")
    assert (mine.settings.lora_targets, mine.settings.lr, mine.settings.kd_weight) == ("q_proj", 3e-4, 4.0)
    assert (mine.settings.unfreeze, mine.steps) == ("norms,biases", 2000)
    assert dry_run("--preset", "paper", "--tokens", "327680").steps == 10
    line = refusal("recover", pairs[GATED][1], "--preset", "paper", "--lr", "1e-6", "--dry-run")
    assert line == "with --preset paper, --min-lr must be at most the learning rate 1e-06, got 1e-05"
    monkeypatch.setitem(PRESETS, "paper", {"lora_rank": 5, "steps": 7})
    assert dry_run("--preset", "paper").settings.lora_rank == 5
    usual = dry_run("--preset", "paper", "--lora-rank", "16")
    assert (usual.settings.lora_rank, usual.settings.full) == (16, False)
    line = refusal("recover", pairs[GATED][1], "--preset", "mine", "--dry-run")
    assert line == "unknown --preset 'mine'; there are paper"
    for flag in ("--full", "--mixers", "--no-teacher", "--control-teaches"):
        line = refusal("recover", pairs[GATED][1], "--preset", "paper", flag, "--dry-run")
        assert f"--preset paper trains adapters, from the uncut model, and {flag} contradicts it" in line


@pytest.mark.parametrize(("name", "changes", "kind"), DRY_RUNS)
def test_a_dry_run_describes_the_training_and_writes_nothing(name, changes, kind, pairs, recover, recoveries, tmp_path):
    preview = slimstate.preview(pairs[name][1], teacher=pairs[name][0], progress=False, **{**BRIEF, **changes})
    assert list(tmp_path.iterdir()) == []
    student, whole = Checkpoint.open(pairs[name][1]), not changes or {"full", "mixers"} & changes.keys()
    parts = {option: value for option, value in changes.items() if option in PARTS}
    adaptation = adaptation_of(resolve(config(**parts), student), student)
    assert preview.unfrozen == (*adaptation.norms, *adaptation.biases)
    assert (preview.targets, preview.convolutions) == (adaptation.targets, adaptation.convolutions)
    assert (preview.targets == ()) == bool(whole)
    assert (preview.parameters, preview.out) == (student.parameters, None)
    record = recover(name, tmp_path / "out", **changes) if kind is None else record_of(recoveries[kind])
    assert preview.trained_parameters == record.trained_parameters
    assert (preview.steps, preview.tokens) == (record.settings.steps, record.tokens)
    assert preview.settings == record.settings


def test_a_dry_run_lists_what_would_be_trained(pairs, succeed):
    def dry_run(name: str, *words: str) -> str:
        return succeed("recover", pairs[name][1], "--teacher", pairs[name][0], "--dry-run", *words)

    out = dry_run(NAME, "--lora")
    assert "adapters on:\n  model.layers.0.attn.q_proj\n" in out
    assert "trained whole:\n  model.layers.0.attn.q_conv1d\n" in out
    assert "2,000 steps, 65,536,000 tokens; dry run: nothing was trained" in out
    for more in ((), ("--full",)):
        assert dry_run(NAME, *more).startswith("all weights are trained\n")
    names = dry_run(GATED, "--preset", "paper").split()
    assert {"model.layers.0.attn.o_norm", "model.norm", "model.layers.1.attn.dt_bias"} <= {*names}


def test_missing_and_misspelt_options_are_refused(pairs, text_file, tmp_path, refusal):
    for missing in ("data", "out"):
        words = flags(**{"data": text_file, "out": tmp_path / "out", missing: None})
        assert refusal("recover", pairs[NAME][1], *words) == "give --data and --out, or --dry-run to train nothing"
    with pytest.raises(PlanError, match="unknown option step; did you mean `steps`"):
        slimstate.recover(pairs[NAME][1], tmp_path / "out", data="text.txt", step=3)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def places(pairs, text_file, tmp_path_factory) -> dict[str, Path]:
    """Models and files that do not fit, by the names that `BAD` has for them."""
    root, (uncut, source) = tmp_path_factory.mktemp("places"), pairs[NAME]
    places = {"UNCUT": uncut, "CUT": source, "TEXT": text_file, "INSIDE": source / "inside", "ABOVE": source.parent}
    places["COPY"] = Path(shutil.copytree(source, root / "copy"))
    places["MORE TOKENS"] = tiny.save(confident(NAME, vocab_size=300), root / "more")
    places["OTHER TOKENS"] = Path(shutil.copytree(uncut, root / "other"))
    tokenizer = (uncut / "tokenizer.json").read_text()
    swapped = tokenizer.replace('"a": ', '"_": ').replace('"b": ', '"a": ').replace('"_": ', '"b": ')
    assert swapped != tokenizer
    (places["OTHER TOKENS"] / "tokenizer.json").write_text(swapped)
    places["ORPHAN"] = Path(shutil.copytree(source, root / "orphan"))
    values = json.loads((source / "config.json").read_text())
    values["slimstate"]["base_model"] = str(root / "gone")
    (places["ORPHAN"] / "config.json").write_text(json.dumps(values))
    places["LITTLE"] = places["FILE"] = root / "little.txt"
    places["LITTLE"].write_text(tiny.text(20))
    places["BLOCKED"] = root / "blocked"
    (root / "blocked.training").write_text("in the way")
    return places


BAD = {
    "more tokens": ({"teacher": "MORE TOKENS"}, ModelError, "a vocabulary of 258, the teacher .*more one of 300"),
    "other tokens": ({"teacher": "OTHER TOKENS"}, ModelError, "have different tokenizers"),
    "itself": ({"teacher": "CUT"}, PlanError, "is the model itself: give the uncut one"),
    "a copy": ({"teacher": "COPY"}, PlanError, "copy is the model itself"),
    "nobody": ({"teacher": "/nowhere/model"}, ModelError, "no model at /nowhere/model"),
    "two teachers": ({"no_teacher": True}, PlanError, "give either --teacher or --no-teacher"),
    "no model": ({"model": "/nowhere/cut"}, ModelError, "no model at /nowhere/cut"),
    "orphan": ({"model": "ORPHAN", "teacher": None}, PlanError, "give the uncut model with --teacher, or --no-teacher"),
    "uncut alone": ({"model": "UNCUT", "teacher": None}, PlanError, "give the uncut model with --teacher"),
    "uncut": ({"model": "UNCUT"}, PlanError, r"is the model itself.*or --control to train it"),
    "control alone": ({**ALONE, "control": True}, PlanError, "--control trains the uncut model too"),
    "cache alone": ({**ALONE, "cache_teacher": "OUT"}, PlanError, "--cache-teacher needs a teacher"),
    "cache in a file": ({"cache_teacher": "FILE"}, OutputError, "little.txt is a file"),
    "targets": ({"lora_targets": "x_proj"}, PlanError, "--lora-targets x_proj matches no linear layer; .* q_proj"),
    "targets of all": ({"lora_targets": "q_proj", "full": True}, PlanError, "--full trains no adapters"),
    "rank of mixers": ({"lora_rank": 4, "mixers": True}, PlanError, "--lora-rank has no effect: --mixers trains no"),
    "adapters and all": ({"lora": True, "full": True}, PlanError, "give only one of --full, --mixers and --lora"),
    "adapters and mixers": ({"lora": True, "mixers": True}, PlanError, "give only one of"),
    "all and mixers": ({"full": True, "mixers": True}, PlanError, "give only one of"),
    "no adapter": ({"keep_adapter": True}, PlanError, "--keep-adapter needs adapters: give --lora"),
    "no adapter of all": ({"keep_adapter": True, "full": True}, PlanError, "--keep-adapter needs adapters"),
    "both": ({"steps": 4, "tokens": 999}, PlanError, "give either --steps or --tokens"),
    "few tokens": ({"steps": None, "tokens": 127}, PlanError, "--tokens must be at least the 128 of one step, got 127"),
    "parts": ({"grad_accum": 3}, PlanError, r"--batch-size must be a multiple of .* 3 parts \(--grad-accum\), got 4"),
    "rising lr": ({"lr": 1e-4, "min_lr": 0.5}, PlanError, "--min-lr must be at most the learning rate 0.0001, got 0.5"),
    "above the model's lr": ({"lr": None, "min_lr": 1e-3}, PlanError, "at most the learning rate 0.0005, got 0.001"),
    "missing data": ({"data": "/nowhere/x.txt"}, DataError, "no data at /nowhere/x.txt"),
    "little data": ({"data": "LITTLE"}, DataError, "has 0 of the 2 windows of 32 tokens that are needed"),
    "missing text": ({"eval_text": "/nowhere/y.txt"}, DataError, "no data at /nowhere/y.txt"),
    "little text": ({"eval_text": "LITTLE"}, DataError, "fewer than a window of 32"),
    "the teacher": ({"out": "UNCUT", "force": True}, OutputError, "the output folder overlaps the model folder"),
    "inside": ({"out": "INSIDE"}, OutputError, "the output folder overlaps the model folder"),
    "above": ({"out": "ABOVE"}, OutputError, "the output folder overlaps the model folder"),
    "exists": ({"out": "COPY"}, OutputError, "copy exists already; choose another folder or use --force"),
    "a file": ({"out": "FILE"}, OutputError, "little.txt is a file"),
    "below a file": ({"out": "FILE/out"}, OutputError, "cannot write"),
    "no run folder": ({"out": "BLOCKED", "force": True}, OutputError, "blocked.training is a file"),
    "control exists": ({"control": True, "control_out": "COPY"}, OutputError, "copy exists already"),
    "fsdp": ({"fsdp": True}, PlanError, "--fsdp shards a model over GPUs: start one process for each with torchrun"),
    "log": ({"report_to": "none,wishes"}, PlanError, "--report-to wishes: wishes is not supported"),
    "device": ({"device": "cuda"}, PlanError, "no CUDA device here"),
    "dtype": ({"dtype": "int4"}, PlanError, "unknown --dtype int4"),
    "half": ({"dtype": "float16"}, PlanError, "--dtype must be bfloat16 or float32"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE)
def test_a_number_out_of_range_is_refused(name, value):
    limits = "(at least|more than|less than) [0-9]|finite"
    with pytest.raises(PlanError, match=rf"^`{name}` must be ({limits}), got {re.escape(f'{value:g}')}$"):
        config(**{name: value})


@pytest.mark.parametrize("name", sorted(BAD))
def test_bad_input_is_refused_in_one_line_and_writes_nothing(name, places, pairs, tmp_path, execute):
    changes, kind, message = BAD[name]
    places = places | {"OUT": tmp_path / "out", "CACHE": tmp_path / "cache", "FILE/out": places["FILE"] / "out"}
    values = {"model": "CUT", "out": "OUT", "teacher": "UNCUT", "data": "TEXT", **SHORT, **changes}
    values = {option: places.get(value, value) for option, value in values.items()}
    model = values.pop("model")
    roots = (tmp_path, places["COPY"].parent, pairs[NAME][0].parent)
    before = {path for root in roots for path in root.rglob("*")}
    with pytest.raises(kind) as error:
        slimstate.recover(model, **values, progress=False)
    line = name_flags(str(error.value))
    assert execute("recover", model, *flags(**values)) == (2, "", f"slimstate: {line}\n")
    assert re.search(message, line)
    assert before == {path for root in roots for path in root.rglob("*")}


@pytest.mark.parametrize(("package", "changes", "way_out"), MISSING)
def test_a_missing_package_is_named_where_it_is_needed(package, changes, way_out, recover, tmp_path, monkeypatch):
    find_spec = options.find_spec
    monkeypatch.setattr(options, "find_spec", lambda name: None if name == package else find_spec(name))
    if way_out is None:
        recover(NAME, tmp_path / "out", **changes)
        return
    with pytest.raises(PlanError, match=f"^{package} cannot be imported: {way_out}"):
        recover(NAME, tmp_path / "out", **changes)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("batch", "length", "at_once"), [(16, 2048, 1), (4, 512, 4), (6, 1024, 2), (3, 3000, 1)])
def test_about_2048_tokens_run_at_once_on_a_cpu(batch, length, at_once):
    values = {"batch_size": batch, "length": length, "device": "cpu"}
    assert RecoverConfig.from_values(values).windows_at_once == at_once
    assert RecoverConfig.from_values({**values, "grad_accum": batch}).windows_at_once == 1
