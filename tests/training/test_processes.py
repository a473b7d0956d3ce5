"""However a training is started, stopped and started again, and by how many processes, it is the same training."""

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
import training_calls
from launching import ALONE, PATIENCE, Program, free_port, options
from places import TESTS
from slimstate.records.training import RECOVERY, RecoveryRecord, TrainingRecord
from slimstate.records.training import TRAINING as TRAINED
from slimstate.training.run_checkpoints import COMPLETE
from tiny_shapes import SHAPES, SIZES

pytestmark = pytest.mark.slow

NAME, GATED = tiny.PLAIN
LIGHT = "mamba2-plain"  # needs no fla, which takes ten seconds to load
SCRIPT = TESTS / "training_commands.py"
TRAINING = {"steps": 8, "length": 32, "batch_size": 4, "lr": 1e-2, "save_every": 2, "report_to": "none"}
DIE_AT = 6


def start(root: Path, name: str, arguments: list) -> subprocess.Popen:
    """What a launcher is told; its words go to files beside the results."""
    with (root / f"{name}.out").open("w") as out, (root / f"{name}.err").open("w") as err:
        return subprocess.Popen([sys.executable, *map(str, arguments)], stdout=out, stderr=err, env=os.environ | ALONE)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> dict[str, tuple[Path, Path]]:
    root = tmp_path_factory.mktemp("pairs")
    found = {}
    for name in (NAME, GATED, LIGHT):
        model = tiny.build(tiny.VARIANTS[name])
        with torch.no_grad():
            model.get_output_embeddings().weight.normal_(std=0.25)  # so that there is something to learn from it
        found[name] = tiny.save(model, root / name, "100KB"), root / f"{name}-cut"
        slimstate.prune(*found[name], method="l1", key_dim=8)
    return found


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("config") / "config.json"
    path.write_text(json.dumps({**SIZES, **SHAPES["delta_net"]}))
    return path


@pytest.fixture(scope="module")
def ended(pairs, config, text_file, tmp_path_factory) -> tuple[Path, dict[str, int]]:
    """Everything that needs processes of its own, at once: the folder of what they left, and their exit codes.

    `alone` is one process, `torchrun` and `accelerate` start two; the first two of these run several commands, of which
    the last is killed. accelerate is the command, which starts processes as the command torchrun does.
    """
    root = tmp_path_factory.mktemp("ended")

    def recover(out: str, name: str = NAME, **changes: object) -> list[str]:
        given = {"teacher": pairs[name][0], "data": text_file, "out": root / out, **TRAINING, **changes}
        return ["recover", str(pairs[name][1]), *options(**given)]

    def killed(out: str, shard: tuple[Path, Path] | None = None, **before: list[str]) -> list[str]:
        commands = {
            **before,
            f"{out}-nowhere": recover(f"{out}-nowhere", data="/nowhere/x.txt"),
            f"{out}-nan": [*recover(f"{out}-nan", lr=1e30, save_every=1), "--full"],
            out: [*recover(out), "--lora"],
        }
        wanted = {"commands": commands, "die_at": DIE_AT, "shard": None if shard is None else list(map(str, shard))}
        return [str(SCRIPT), str(root), json.dumps(wanted)]

    train = ["train", str(config), *options(data=text_file, out=root / "trained", shared_filters="head", **TRAINING)]
    whole = {"torchrun": [*recover("torchrun"), "--lora", "--json"], "trained": train}
    torchrun = [TESTS / "forked_torchrun.py", free_port(), *killed("pair", pairs[GATED], **whole)]
    # what it has for CPUs needs MPI, so the processes are started as for GPUs, and find none
    accelerate = [
        "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", 2, "--num_machines", 1,
        "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", free_port(),
        "-m", "slimstate",
    ]  # fmt: skip
    started = {
        "alone": Program(*killed("alone"), out=root / "alone.out", err=root / "alone.err"),
        "torchrun": Program(*torchrun, out=root / "torchrun.out", err=root / "torchrun.err"),
        "accelerate": start(root, "accelerate", [*accelerate, *recover("accelerate", LIGHT), "--json"]),
    }
    try:
        return root, {name: process.wait(PATIENCE) for name, process in started.items()}
    finally:
        for process in started.values():
            process.kill()


@pytest.fixture(scope="module")
def unbroken(pairs, text_file, tmp_path_factory) -> dict[str, tuple[Path, RecoveryRecord]]:
    """The recoveries that one process makes without a break: one with adapters, one of all weights."""
    found = {}
    for name in (NAME, LIGHT):
        (uncut, cut), out = pairs[name], tmp_path_factory.mktemp("whole") / "out"
        given = {"teacher": uncut, "data": str(text_file), "lora": name == NAME, **TRAINING}
        found[name] = out, training_calls.recover(cut, out, **given)
    return found


@pytest.fixture(scope="module")
def whole(unbroken) -> tuple[Path, RecoveryRecord]:
    return unbroken[NAME]


def said(root: Path, name: str, stream: str = "err") -> str:
    return (root / f"{name}.{stream}").read_text()


def succeeds(root: Path, name: str) -> bool:
    """Whether a command ended well in both processes of torchrun."""
    codes = [root / f"{name}.{rank}.code" for rank in range(2)]
    return all(path.exists() and path.read_text() == "0" for path in codes)


def said_by_all(root: Path, name: str, stream: str = "err") -> str:
    """Of `accelerate` both processes write into one file, of other commands each into its own."""
    if name == "accelerate":
        return said(root, name, stream)
    return "".join(said(root, f"{name}.{rank}", stream) for rank in range(2))


def same(record: RecoveryRecord, expected: RecoveryRecord, tolerance: float = 1e-4) -> None:
    assert [entry.step for entry in record.log] == [entry.step for entry in expected.log]
    for part in ("loss", "cross_entropy", "distillation", "learning_rate"):
        found, wanted = ([getattr(entry, part) for entry in each.log] for each in (record, expected))
        assert found == pytest.approx(wanted, abs=tolerance)
    assert record.measured.nats.known() == pytest.approx(expected.measured.nats.known(), rel=1e-3)
    assert (record.settings, record.corpus) == (expected.settings, expected.corpus)


@pytest.mark.parametrize(("launcher", "name"), [("torchrun", NAME), ("accelerate", LIGHT)])
def test_two_processes_recover_as_one(launcher, name, ended, unbroken):
    (root, codes), whole = ended, unbroken[name]
    succeeded = codes["accelerate"] == 0 if launcher == "accelerate" else succeeds(root, launcher)
    assert succeeded, said(root, launcher)
    record = RecoveryRecord.read(root / launcher / RECOVERY)
    assert record.to_json() == json.loads(said_by_all(root, launcher, "out"))
    assert record.processes == 2
    same(record, whole[1])
    training = f"training {record.trained_parameters:,} parameters for 8 steps"
    for line in ("kernels: PyTorch", training, "recovering 8/8  loss "):
        assert said_by_all(root, launcher).count(line) == 1
    assert {path.name for path in (root / launcher).iterdir()} == {path.name for path in whole[0].iterdir()}
    assert not (root / f"{launcher}.training").exists()


def test_two_processes_train_as_one(ended, config, text_file, tmp_path):
    """Each works on half of every batch; the initial model and the tokens are made once."""
    root, _ = ended
    assert succeeds(root, "trained"), said_by_all(root, "trained")
    given = {"data": str(text_file), "shared_filters": "head", **TRAINING}
    alone = training_calls.train(config, tmp_path / "alone", **given)
    record = TrainingRecord.read(root / "trained" / TRAINED)
    assert record.processes == 2
    assert [entry.loss for entry in record.log] == pytest.approx([entry.loss for entry in alone.log], rel=1e-4)
    check_shared(root / "trained", "head")
    assert "--shared-filters head" in record.command
    assert "--lr 0.01" in record.command
    out = said(root, "trained.0", "out")
    assert "tokens/s" in out
    assert f"written to {root / 'trained'}" in out
    assert said(root, "trained.1", "out") == ""


@pytest.mark.parametrize("name", ["alone", "pair"])
def test_a_killed_recovery_goes_on_in_one_process_as_if_nothing_had_happened(
    name, ended, whole, pairs, text_file, monkeypatch
):
    """Killed between writing a checkpoint and marking it as whole: that one is not trusted."""
    root, codes = ended
    if name == "alone":
        assert codes["alone"] == -signal.SIGKILL, said(root, "alone")
    else:
        assert "Signal 9 (SIGKILL)" in said(root, "torchrun")
    folder = root / f"{name}.training" / "model"
    marked = {path.parent.name for path in folder.glob(f"*/{COMPLETE}")}
    assert (folder / f"checkpoint-{DIE_AT}").exists()
    assert f"checkpoint-{DIE_AT - 2}" in marked
    assert f"checkpoint-{DIE_AT}" not in marked
    assert not (root / name).exists()
    given = {"teacher": pairs[NAME][0], "data": str(text_file), "lora": True, **TRAINING}
    with pytest.raises(slimstate.SlimstateError, match="`resume` continues it, `force` starts over"):
        training_calls.recover(pairs[NAME][1], root / name, **given)
    lines: list[str] = []
    monkeypatch.setattr(slimstate.Reporter, "say", lambda self, line: lines.append(line))
    record = training_calls.recover(pairs[NAME][1], root / name, resume=True, progress=False, **given)
    assert f"going on from {folder / f'checkpoint-{DIE_AT - 2}'}" in lines
    same(record, whole[1])
    if name == "alone":
        assert [entry.loss for entry in record.log] == [entry.loss for entry in whole[1].log]
        for shard in whole[0].glob("*.safetensors"):
            assert (root / name / shard.name).read_bytes() == shard.read_bytes()
    assert not (root / f"{name}.training").exists()


@pytest.mark.parametrize(("name", "rank"), [("alone", 0), ("pair", 0), ("pair", 1)])
def test_what_is_wrong_is_said_once_and_all_end_alike(name, rank, ended):
    """Text that is not there is bad input; a loss that is no number ends a training, and keeps what it had."""
    root, _ = ended
    folder = root / f"{name}-nan.training" / "model"
    last = max(int(path.parent.name.partition("-")[2]) for path in folder.glob(f"*/{COMPLETE}"))
    stopped = f"NaN or infinite at step {last + 1}: the last good checkpoint is {folder / f'checkpoint-{last}'}"
    for wrong, code, complaint in (("nowhere", 2, "no data at /nowhere/x.txt"), ("nan", 3, stopped)):
        words = said(root, f"{name}-{wrong}.{rank}")
        assert int(said(root, f"{name}-{wrong}.{rank}", "code")) == code, words
        (found,) = [line for line in words.splitlines() if line.startswith("slimstate: ")]
        assert complaint in found
    spoken = [said(root, f"{name}-nan.{rank}"), said(root, f"{name}.{rank}")]
    assert [words.count("kernels: ") for words in spoken] == ([1, 1] if rank == 0 else [0, 0])
    for missing in (f"{name}-nowhere", f"{name}-nowhere.training", f"{name}-nan"):
        assert not (root / missing).exists()


@pytest.mark.parametrize("kind", ["adapters", "full"])
def test_a_sharded_student_has_the_loss_and_gradients_of_a_whole_one(kind, ended):
    root, _ = ended
    assert (root / "sharded.pt").exists(), said(root, "torchrun")
    found = torch.load(root / "sharded.pt")[kind]
    assert found["blocks"] == 2
    torch.testing.assert_close(*found["losses"])
    ours, theirs = found["gradients"]
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert gradient.any(), name
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()))
    sharded, whole = found["states"]
    assert sharded.keys() == whole.keys() == theirs.keys()  # only what is trained is saved
    assert all(torch.equal(sharded[name], whole[name]) for name in whole)
