"""A training is the same with one process or several, and after it was killed and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_shared_filters import check_shared

import slimstate
import tiny
from launching import ALONE, Program, free_port, options, start_ranks, wait_for_all
from places import TESTS
from recoveries import SHORT, Listener, confident, cut, losses, weights_of
from slimstate.records.training import RECOVERY, RecoveryRecord, TrainingRecord
from slimstate.records.training import TRAINING as TRAINED
from slimstate.training.run_checkpoints import COMPLETE
from tiny_shapes import SHAPES, SIZES

pytestmark = pytest.mark.slow

NAME, GATED = tiny.PLAIN
LIGHT = "mamba2-plain"  # needs no fla, which takes ten seconds to load
SCRIPT = TESTS / "training_commands.py"
LONGER = {**SHORT, "steps": 8}
DIE_AT = 6


def start(root: Path, name: str, arguments: list) -> subprocess.Popen:
    """Start a launcher; its output goes to files beside the results."""
    with (root / f"{name}.out").open("w") as out, (root / f"{name}.err").open("w") as err:
        return subprocess.Popen([sys.executable, *map(str, arguments)], stdout=out, stderr=err, env=os.environ | ALONE)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> dict[str, tuple[Path, Path]]:
    root = tmp_path_factory.mktemp("pairs")
    uncut = {name: tiny.save(confident(name), root / name, "100KB") for name in (NAME, GATED, LIGHT)}
    return {name: (folder, cut(folder, root / f"{name}-cut")) for name, folder in uncut.items()}


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("config") / "config.json"
    path.write_text(json.dumps({**SIZES, **SHAPES["delta_net"]}))
    return path


@pytest.fixture(scope="module")
def results(pairs, config, text_file, tmp_path_factory) -> tuple[Path, dict[str | int, int]]:
    """Run everything that needs processes of its own at once; return the folder of the results, and the exit codes.

    `alone` is one process, `pair` are two as torchrun starts them; both run several commands, of which the last is
    killed. `accelerate` is the command, which starts two processes as the command torchrun does.
    """
    root = tmp_path_factory.mktemp("results")

    def recover(out: str, name: str = NAME, **changes: object) -> list[str]:
        values = {"teacher": pairs[name][0], "data": text_file, "out": root / out, **LONGER, **changes}
        return ["recover", str(pairs[name][1]), *options(**values)]

    def killed(out: str, shard: tuple[Path, Path] | None = None, **before: list[str]) -> list[str]:
        commands = {
            **before,
            f"{out}-nowhere": recover(f"{out}-nowhere", data="/nowhere/x.txt"),
            f"{out}-nan": recover(f"{out}-nan", lr=1e30, save_every=1, full=True),
            out: recover(out, lora=True),
        }
        request = {"commands": commands, "die_at": DIE_AT, "shard": None if shard is None else list(map(str, shard))}
        return [str(SCRIPT), str(root), json.dumps(request)]

    train = ["train", str(config), *options(data=text_file, out=root / "trained", shared_filters="head", **LONGER)]
    complete = {"ranks": recover("ranks", lora=True, json=True), "trained": train}
    # what it has for CPUs needs MPI, so the processes are started as for GPUs, and find none
    accelerate = [
        "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", 2, "--num_machines", 1,
        "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", free_port(),
        "-m", "slimstate",
    ]  # fmt: skip
    programs = {
        "alone": Program(*killed("alone"), err=root / "alone.err"),
        "accelerate": start(root, "accelerate", [*accelerate, *recover("accelerate", LIGHT, json=True)]),
        **dict(enumerate(start_ranks(2, root, *killed("pair", pairs[GATED], **complete)))),
    }
    return root, dict(zip(programs, wait_for_all(programs.values()), strict=True))


@pytest.fixture(scope="module")
def unbroken(pairs, text_file, tmp_path_factory) -> dict[str, tuple[Path, RecoveryRecord]]:
    """Recoveries by one process without an interruption: one with adapters, one of all weights."""
    root, records = tmp_path_factory.mktemp("unbroken"), {}
    for name in (NAME, LIGHT):
        uncut, source = pairs[name]
        values = {"teacher": uncut, "data": text_file, "lora": name == NAME, **LONGER}
        records[name] = root / name, slimstate.recover(source, root / name, progress=False, **values)
    return records


def output_of(root: Path, name: str, stream: str = "err") -> str:
    return (root / f"{name}.{stream}").read_text()


def succeeds(root: Path, name: str) -> bool:
    """Return whether a command succeeded in both processes."""
    codes = [root / f"{name}.{rank}.code" for rank in range(2)]
    return all(path.exists() and path.read_text() == "0" for path in codes)


def output_of_all(root: Path, name: str, stream: str = "err") -> str:
    """Return the output of both processes, which `accelerate` writes to one file."""
    if name == "accelerate":
        return output_of(root, name, stream)
    return "".join(output_of(root, f"{name}.{rank}", stream) for rank in range(2))


def check_same(record: RecoveryRecord, expected: RecoveryRecord) -> None:
    assert [entry.step for entry in record.log] == [entry.step for entry in expected.log]
    for part in ("loss", "cross_entropy", "distillation", "learning_rate"):
        values = [[getattr(entry, part) for entry in each.log] for each in (record, expected)]
        assert values[0] == pytest.approx(values[1], abs=1e-4)
    assert record.measured.nats.known() == pytest.approx(expected.measured.nats.known(), rel=1e-3)
    assert (record.settings, record.corpus) == (expected.settings, expected.corpus)


@pytest.mark.parametrize(("launcher", "name"), [("ranks", NAME), ("accelerate", LIGHT)])
def test_two_processes_recover_as_one(launcher, name, results, unbroken):
    (root, codes), whole = results, unbroken[name]
    succeeded = codes["accelerate"] == 0 if launcher == "accelerate" else succeeds(root, launcher)
    assert succeeded, output_of(root, launcher)
    record = RecoveryRecord.read(root / launcher / RECOVERY)
    assert record.to_json() == json.loads(output_of_all(root, launcher, "out"))
    assert record.processes == 2
    check_same(record, whole[1])
    training = f"training {record.trained_parameters:,} parameters for 8 steps"
    for line in ("kernels: PyTorch", training, "recovering 8/8  loss "):
        assert output_of_all(root, launcher).count(line) == 1
    assert {path.name for path in (root / launcher).iterdir()} == {path.name for path in whole[0].iterdir()}
    assert not (root / f"{launcher}.training").exists()


def test_two_processes_train_as_one(results, config, text_file, tmp_path):
    """Each works on half of every batch; the initial model and the tokens are written once."""
    root, _ = results
    assert succeeds(root, "trained"), output_of_all(root, "trained")
    values = {"data": text_file, "shared_filters": "head", **LONGER}
    alone = slimstate.train(config, tmp_path / "alone", progress=False, **values)
    record = TrainingRecord.read(root / "trained" / TRAINED)
    assert record.processes == 2
    assert losses(record) == pytest.approx(losses(alone), rel=1e-4)
    check_shared(root / "trained", "head")
    assert record.config.items() >= {"command": "train", "shared_filters": "head", "lr": 0.01}.items()
    out = output_of(root, "trained.0", "out")
    assert "tokens/s" in out
    assert f"written to {root / 'trained'}" in out
    assert output_of(root, "trained.1", "out") == ""


@pytest.mark.parametrize("name", ["alone", "pair"])
def test_a_killed_recovery_continues_in_one_process_as_if_nothing_had_happened(
    name, results, unbroken, pairs, text_file
):
    """Killed between writing a checkpoint and marking it as complete: that checkpoint is not used."""
    (root, codes), whole = results, unbroken[NAME]
    for process in ("alone",) if name == "alone" else (0, 1):
        assert codes[process] == -signal.SIGKILL, output_of(root, "alone" if name == "alone" else f"rank{process}")
    folder = root / f"{name}.training" / "model"
    marked = {path.parent.name for path in folder.glob(f"*/{COMPLETE}")}
    assert (folder / f"checkpoint-{DIE_AT}").exists()
    assert f"checkpoint-{DIE_AT - 2}" in marked
    assert f"checkpoint-{DIE_AT}" not in marked
    assert not (root / name).exists()
    values, listener = {"teacher": pairs[NAME][0], "data": text_file, "lora": True, **LONGER}, Listener()
    with pytest.raises(slimstate.SlimstateError, match="`resume` continues it, `force` starts over"):
        slimstate.recover(pairs[NAME][1], root / name, **values)
    record = slimstate.recover(pairs[NAME][1], root / name, resume=True, progress=listener, **values)
    assert f"continuing from {folder / f'checkpoint-{DIE_AT - 2}'}" in listener.lines
    check_same(record, whole[1])
    if name == "alone":
        assert losses(record) == losses(whole[1])
        assert weights_of(root / name) == weights_of(whole[0])
    assert not (root / f"{name}.training").exists()


@pytest.mark.parametrize(("name", "rank"), [("alone", 0), ("pair", 0), ("pair", 1)])
def test_an_error_is_shown_once_and_all_processes_end_with_the_same_code(name, rank, results):
    """Missing text is bad input; a loss that is not finite ends a training, and leaves its checkpoints."""
    root, _ = results
    folder = root / f"{name}-nan.training" / "model"
    last = max(int(path.parent.name.partition("-")[2]) for path in folder.glob(f"*/{COMPLETE}"))
    stopped = f"NaN or infinite at step {last + 1}: the last good checkpoint is {folder / f'checkpoint-{last}'}"
    for kind, code, message in (("nowhere", 2, "no data at /nowhere/x.txt"), ("nan", 3, stopped)):
        output = output_of(root, f"{name}-{kind}.{rank}")
        assert int(output_of(root, f"{name}-{kind}.{rank}", "code")) == code, output
        (line,) = [line for line in output.splitlines() if line.startswith("slimstate: ")]
        assert message in line
    outputs = [output_of(root, f"{name}-nan.{rank}"), output_of(root, f"{name}.{rank}")]
    assert [output.count("kernels: ") for output in outputs] == ([1, 1] if rank == 0 else [0, 0])
    for missing in (f"{name}-nowhere", f"{name}-nowhere.training", f"{name}-nan"):
        assert not (root / missing).exists()


@pytest.mark.parametrize("kind", ["adapters", "full"])
def test_a_sharded_student_has_the_loss_and_gradients_of_a_whole_one(kind, results):
    root, _ = results
    assert (root / "sharded.pt").exists(), output_of(root, "rank0")
    sharding = torch.load(root / "sharded.pt")[kind]
    assert sharding["blocks"] == 2
    torch.testing.assert_close(*sharding["losses"])
    ours, theirs = sharding["gradients"]
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert gradient.any(), name
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()))
    sharded, whole = sharding["states"]
    assert sharded.keys() == whole.keys() == theirs.keys()  # only what is trained is saved
    assert all(torch.equal(sharded[name], whole[name]) for name in whole)
