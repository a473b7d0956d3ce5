"""An option is declared once: the flag, the Python keyword, the key in files and the provenance follow from it.

The config of a result is its provenance: `slimstate run RESULT` repeats the work and gives the same result.
"""

import ast
import inspect
import json
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import pytest
import torch
from click.testing import CliRunner
from msgspec import Meta

import slimstate
import tiny
from slimstate.cli.app import COMMANDS, find_command, run
from slimstate.cli.commands import Command, WorkflowCommand, flag_of
from slimstate.core.file_names import CONFIG
from slimstate.records.provenance import INPUTS, command_line, run_config
from slimstate.records.training import ReconstructionRecord
from slimstate.system.errors import DataError, PlanError, SlimstateError
from slimstate.system.options import Options, once, options_of, prefixed
from slimstate.workflows.run import read_config


class Rounds(Options):
    """Rounds of work"""

    steps: Annotated[int, Meta(ge=1)] = 10
    """Steps of every round."""
    rate: Annotated[float, Meta(gt=0, lt=1)] = 0.5
    """Rate of every round."""

    def check(self) -> None:
        if self.steps == 13:
            raise PlanError("`steps` must not be 13")


class ShrinkConfig(Options):
    """How to shrink"""

    size: Annotated[int | None, Meta(ge=1, le=100)] = None
    """Size of the result."""
    mode: Literal["fast", "exact"] = "fast"
    """fast or exact."""
    sizes: tuple[int, ...] = ()
    """Sizes to try."""
    notes: Path | None = None
    """Folder of notes."""
    thorough: bool = False
    """Take more time."""
    force: bool = once()
    """Replace the result."""
    rounds: Rounds = Rounds()
    tune: Rounds | None = None
    """Tune the result."""


def shrink(model: str, out: str | None = None, config: ShrinkConfig | None = None, **options: Any) -> SimpleNamespace:
    """Shrink something.

    Parameters:
        model: What to shrink.
        out: Where the result goes.
    """
    config = ShrinkConfig.merge(config, options)
    record = run_config("shrink", {"model": model, "out": out}, config.to_values())
    return SimpleNamespace(config=config, record=record, out=out, to_json=lambda: record)


class ShrinkCommand(Command):
    """A command whose workflow is declared here."""

    declaration = ast.parse(inspect.getsource(shrink)).body[0]


SHRINK = ShrinkCommand(
    name="shrink", config=ShrinkConfig, show=lambda result: [str(result.record)],
    run=lambda flags, reporter, **inputs: shrink(**inputs),
)  # fmt: skip
EVERY_KIND = {
    "size": 7, "mode": "exact", "sizes": [3, 2], "notes": "n", "thorough": True, "steps": 4, "tune": True,
    "tune_rate": 0.25,
}  # fmt: skip


def invoke(command: Any, *words: object) -> str:
    result = CliRunner().invoke(command, list(map(str, words)), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_declared_option_is_a_flag_a_keyword_a_key_in_files_and_provenance(tmp_path, monkeypatch):
    monkeypatch.setattr("slimstate.cli.app.find_command", {"shrink": SHRINK}.get)
    record = {"command": "shrink", "model": "m", **EVERY_KIND}
    assert shrink("m", **EVERY_KIND).record == record
    forced = shrink("m", **EVERY_KIND, force=True)  # an option of one run is no provenance
    assert (forced.config.force, forced.record) == (True, record)
    words = command_line(record).split()[2:]  # the shell command, without `slimstate shrink`
    assert json.loads(invoke(WorkflowCommand(SHRINK), *words, "--json")) == record
    toml = "".join(f"{name} = {json.dumps(value)}\n" for name, value in record.items())
    files = {"config.toml": toml, "config.json": json.dumps(record), "record.json": json.dumps({"config": record})}
    (tmp_path / "result").mkdir()
    for name, content in (files | {"result/slimstate_config.json": json.dumps(record)}).items():
        (tmp_path / name).write_text(content)
        path = tmp_path / name.removesuffix("/slimstate_config.json")
        out = invoke(run, path, "--json", "--force", "--out", "o")
        assert json.loads(out) == {**record, "out": "o"}
    text = " ".join(invoke(WorkflowCommand(SHRINK), "--help").split())
    assert "Size of the result." in text
    assert "Rounds of work: --steps INTEGER Steps of every round. [default: 10]" in text
    assert "--tune Tune the result." in text
    assert "--tune-rate FLOAT Rate of every round. [default: 0.5]" in text
    assert "MODEL: What to shrink." in text


def test_a_folder_of_records_without_a_config_is_refused_with_one_of_them(tmp_path):
    (tmp_path / "other.json").write_text('{"command": "shrink"}')
    (tmp_path / "sweep.json").write_text('{\n "kind": "sweep",\n "format": 1,\n "config": {"command": "shrink"}}')
    with pytest.raises(DataError, match=r"has no slimstate_config.json: name a record in it, such as .*/sweep.json$"):
        read_config(tmp_path)
    assert read_config(tmp_path / "sweep.json") == {"command": "shrink"}


def test_inputs_and_options_of_a_config_file_are_checked():
    for values, message in (
        ({}, "shrink needs `model`"),
        ({"model": 5}, "`model` of shrink must be text, got 5"),
        ({"model": "m", "out": ["a"]}, "`out` of shrink must be text"),
        ({"model": "", "out": "o"}, "`model` must not be empty"),
        ({"model": "m", "sise": 5}, r"did you mean `size`\?"),
    ):
        with pytest.raises(PlanError, match=message):
            SHRINK.parse(values)


def test_groups_are_accepted_as_values_and_options_override_a_config():
    config = ShrinkConfig(rounds=Rounds(steps=4), tune=Rounds(rate=0.25))
    assert ShrinkConfig.from_values({"rounds": Rounds(steps=4), "tune": Rounds(rate=0.25)}) == config
    assert ShrinkConfig.from_values({"steps": 4, "tune": True, "tune_rate": 0.25}) == config
    assert ShrinkConfig.merge(config, {}) is config
    merged = {"steps": 4, "tune": True, "tune_steps": 2, "tune_rate": 0.25}
    assert ShrinkConfig.merge(config, {"tune_steps": 2}).to_values() == merged
    assert ShrinkConfig.merge(config, {"tune": False}).tune is None
    assert ShrinkConfig.from_values({"sizes": "3, 2", "notes": "x"}) == ShrinkConfig(sizes=(3, 2), notes=Path("x"))
    with pytest.raises(PlanError, match="must be a ShrinkConfig, got Rounds"):
        ShrinkConfig.merge(Rounds(), {})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"size": "7"}, "`size` must be a whole number, got '7'"),
        ({"size": 7.0}, "`size` must be a whole number, got 7.0"),
        ({"size": True}, "`size` must be a whole number, got True"),
        ({"size": 0}, "`size` must be at least 1, got 0"),
        ({"size": 101}, "`size` must be at most 100, got 101"),
        ({"steps": 10**30}, "`steps` must be at most 9007199254740992, got 1000"),
        ({"rate": 0}, "`rate` must be more than 0, got 0"),
        ({"rate": float("nan")}, "`rate` must be finite, got nan"),
        ({"rate": 1}, "`rate` must be less than 1, got 1"),
        ({"rate": None}, "`rate` must be a number, got None"),
        ({"mode": "slow"}, "unknown `mode` slow; there are fast, exact"),
        ({"mode": ["fast"]}, "unknown `mode`"),
        ({"sizes": 3}, "`sizes` must be a list, got 3"),
        ({"sizes": "3,x"}, "`sizes` must be a whole number, got 'x'"),
        ({"notes": 3}, "`notes` must be a path, got 3"),
        ({"thorough": "yes"}, "`thorough` must be true or false, got 'yes'"),
        ({"tune": "yes"}, "`tune` must be true, false or a Rounds, got 'yes'"),
        ({"tune": ShrinkConfig()}, "`tune` must be a Rounds, got ShrinkConfig"),
        ({"rounds": ShrinkConfig()}, "`rounds` must be a Rounds, got ShrinkConfig"),
        ({"szie": 7}, "unknown option szie; did you mean `size`?"),
        ({"qqqq": 7}, "unknown option qqqq; there are size, mode"),
        ({"rounds": 7}, "unknown option rounds"),
        ({"tune_steps": 7}, "`tune_steps` needs `tune`"),
        ({"tune": True, "tune_steps": 0}, "`tune_steps` must be at least 1, got 0"),
        ({"tune": True, "tune_steps": 13}, "`tune_steps` must not be 13"),
        ({"steps": 13}, "`steps` must not be 13"),
    ],
)
def test_values_that_do_not_fit_are_refused_by_name(values, message):
    with pytest.raises(PlanError) as refusal:
        shrink("m", **values)
    assert message in str(refusal.value)


def test_errors_of_a_group_name_its_options_as_the_config_does():
    with pytest.raises(SlimstateError, match="`tune_steps` and `other` are too many"), prefixed("tune_", Rounds):
        raise PlanError("`steps` and `other` are too many")


@pytest.mark.parametrize("command", map(find_command, COMMANDS), ids=list(COMMANDS))
def test_the_flags_of_a_command_are_its_inputs_and_options_and_each_has_a_help_text(command):
    declared = [*options_of(command.config), *options_of(command.flags)]
    names = [*command.inputs, *(option.name for option in declared)]
    assert len({*names}) == len(names)
    params = {param.name: param for param in WorkflowCommand(command).params}
    assert list(params) == names
    for name, param in params.items():
        if name != command.argument:
            assert flag_of(name) in param.opts
            assert param.help, name
    assert command.argument is None or command.input_help(command.argument)
    for option in declared:
        assert option.help.endswith(".") or option.help.startswith("{"), option.name


@pytest.mark.parametrize("command", map(find_command, COMMANDS), ids=list(COMMANDS))
def test_the_command_line_of_a_config_is_parsed_as_that_config(command):
    values = {name: ["x"] if name == "models" else "x" for name in command.inputs}
    assert command.argument in (None, *INPUTS)
    words = command_line({"command": command.name, **values}).split()[1 + len(command.name.split()) :]
    context = WorkflowCommand(command).make_context("x", list(words))
    assert {name: list(context.params[name]) if name == "models" else context.params[name] for name in values} == values


NAME = "delta_net-plain"
STEPS = "--data TEXT --steps 2 --batch-size 2 --length 32 --report-to none"
LAYERS = "--data TEXT --steps 2 --batch 2 --samples 10 --length 32"
WINDOWS = "--data TEXT --samples 4 --length 64 --seed 3"
LAYERWISE = "--reconstruct --reconstruct-steps 2 --reconstruct-batch 2 --reconstruct-samples 10 --reconstruct-length 32"
FAST = [
    f"prune MODEL --key-dim 8 --score k --rrqr-f 2 {WINDOWS}",
    "prune MODEL --state-mb 0.01 --method l1 --keep-norm-eps",
]
SLOW = [
    f"prune MODEL --key-dim 8 --data TEXT {LAYERWISE} --distill 2",
    f"reconstruct CUT --teacher MODEL {LAYERS} --learning-rate 0.003",
    f"reconstruct CUT {LAYERS} --distill 2",
    f"recover CUT {STEPS} --preset paper --lora-rank 4",
    f"recover CUT {STEPS} --mixers --kd-weight 0.5 --control",
    f"train SHAPE {STEPS} --shared-filters head --second-beta 0.9",
]
MEASUREMENTS = [
    "eval CUT --text TEXT --length 64 --max-tokens 512 --baseline MODEL",
    f"sweep MODEL --text TEXT --text-length 64 --max-tokens 512 --methods l1,drrqr --key-dims 12,8 {WINDOWS}",
    "analyze MODEL CUT --text TEXT --length 64 --skip 16 --every 16",
]
VOLATILE = ("seconds", "out", "config", "command", "recommended")


@pytest.fixture(scope="module")
def places(folders, text_file, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("inputs")
    slimstate.prune(folders[NAME], root / "cut", method="l1", key_dim=8)
    shape = tiny.write_shape(root / "shape.json", "delta_net")
    return {"MODEL": folders[NAME], "TEXT": text_file, "CUT": root / "cut", "SHAPE": shape}


@pytest.mark.parametrize("line", [*FAST, *(pytest.param(line, marks=pytest.mark.slow) for line in SLOW)])
def test_a_model_is_written_again_from_its_own_config(line, places, tmp_path, succeed, refusal):
    """The config does not name the folder of the result; read from there, it gives the same tensors and config."""
    first, second = tmp_path / "first", tmp_path / "second"
    succeed(*[places.get(word, word) for word in shlex.split(line)], "--out", first)
    if "--distill" in line:
        assert json.loads((first / ReconstructionRecord.FILE).read_text())["distillation"] is not None
    assert "--out" in refusal("run", first), "nothing is overwritten"
    succeed("run", first, "--out", second)
    assert (first / CONFIG).read_text() == (second / CONFIG).read_text()
    for kind in ("", "-control") if "--control" in line else ("",):
        one, two = (tiny.read_tensors(tmp_path / f"{name}{kind}") for name in ("first", "second"))
        assert one.keys() == two.keys() != set()
        assert all(torch.equal(tensor, two[key]) for key, tensor in one.items())
    assert succeed("run", first, "--dry-run").strip() == command_line(json.loads((first / CONFIG).read_text()))


@pytest.mark.slow
@pytest.mark.usefixtures("unrendered")
@pytest.mark.parametrize("line", MEASUREMENTS)
def test_a_measurement_is_repeated_from_its_own_record(line, places, tmp_path, succeed):
    def record_in(out: Path) -> Path:
        files = [out] if out.is_file() else sorted(out.glob("*.json"))
        return next(path for path in files if "config" in path.read_text())

    def numbers(path: Path) -> dict[str, object]:
        return {key: value for key, value in json.loads(path.read_text()).items() if key not in VOLATILE}

    suffix = ".json" if line.startswith("eval") else ""
    first, second = tmp_path / f"first{suffix}", tmp_path / f"second{suffix}"
    succeed(*[places.get(word, word) for word in shlex.split(line)], "--out", first)
    succeed("run", record_in(first), "--out", second)
    assert numbers(record_in(first)) == numbers(record_in(second))
