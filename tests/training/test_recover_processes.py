"""However a recovery is started, stopped and started again, and by how many processes, it is the same recovery."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import slimstate
from cutting import pruned
import tiny
import training_calls
from launching import PATIENCE, free_port, options
from places import TESTS
from slimstate.records.training import RECOVERY, RecoveryRecord
from slimstate.training.trainer import WHOLE

NAME, GATED = tiny.PLAIN
SCRIPT = TESTS / "recover_commands.py"
TRAINING = {"steps": 8, "length": 32, "batch_size": 4, "lr": 1e-2, "save_every": 2, "report_to": "none"}
DIE_AT = 6


def start(root: Path, name: str, arguments: list, **environment: str) -> subprocess.Popen:
    """A process whose words go to files beside the results."""
    with (root / f"{name}.out").open("w") as out, (root / f"{name}.err").open("w") as err:
        settings = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | environment
        return subprocess.Popen([sys.executable, *map(str, arguments)], stdout=out, stderr=err, env=settings)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> dict[str, tuple[Path, Path]]:
    root = tmp_path_factory.mktemp("pairs")
    found = {}
    for name in tiny.PLAIN:
        model = tiny.build(tiny.VARIANTS[name])
        with torch.no_grad():
            model.get_output_embeddings().weight.normal_(std=0.25)  # so that there is something to learn from it
        found[name] = tiny.save(model, root / name, "100KB"), root / f"{name}-cut"
        pruned(*found[name], method="l1", key_dim=8)
    return found


@pytest.fixture(scope="module")
def ended(pairs, text_file, tmp_path_factory) -> tuple[Path, dict[str, int]]:
    """Everything that needs processes of its own, at once: the folder of what they left, and their exit codes.

    `alone` and `pair` are one process and two that are killed at the end; `torchrun` and `accelerate` are left alone.
    """
    root = tmp_path_factory.mktemp("ended")

    def recover(out: str, **changes: object) -> list[str]:
        given = {"teacher": pairs[NAME][0], "data": text_file, "out": root / out, **TRAINING, **changes}
        return ["recover", str(pairs[NAME][1]), *options(**given)]

    def killed(out: str, *shard: Path) -> list[str]:
        commands = [
            recover(f"{out}-nowhere", data="/nowhere/x.txt"),
            [*recover(f"{out}-nan", lr=1e30, save_every=1), "--full"],
            recover(out),
        ]
        asked = {"commands": commands, "die_at": DIE_AT, "shard": list(map(str, shard)) or None}
        return [str(SCRIPT), str(root), json.dumps(asked)]

    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": "2"}
    launchers = {
        "torchrun": ["torch.distributed.run", "--nproc-per-node", 2, "--master-port", free_port()],
        # what it has for CPUs needs MPI, so the processes are started as for GPUs, and find none
        "accelerate": [
            "accelerate.commands.launch", "--multi_gpu", "--num_processes", 2, "--num_machines", 1,
            "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", free_port(),
        ],
    }  # fmt: skip
    started = {
        "alone": start(root, "alone", killed("alone")),
        **{
            f"pair-{rank}": start(
                root, f"pair-{rank}", killed("pair", *pairs[GATED]), **meeting, RANK=str(rank), LOCAL_RANK=str(rank)
            )
            for rank in range(2)
        },
        **{
            name: start(root, name, ["-m", *launcher, "-m", "slimstate", *recover(name), "--json"])
            for name, launcher in launchers.items()
        },
    }
    try:
        return root, {name: process.wait(PATIENCE) for name, process in started.items()}
    finally:
        for process in started.values():
            process.kill()


@pytest.fixture(scope="module")
def whole(pairs, text_file, tmp_path_factory) -> tuple[Path, RecoveryRecord]:
    """The recovery that one process makes without a break."""
    out = tmp_path_factory.mktemp("whole") / "out"
    return out, training_calls.recover(pairs[NAME][1], out, teacher=pairs[NAME][0], data=str(text_file), **TRAINING)


def said(root: Path, name: str, stream: str = "err") -> str:
    return (root / f"{name}.{stream}").read_text()


def same(record: RecoveryRecord, expected: RecoveryRecord, tolerance: float = 1e-4) -> None:
    assert [entry.step for entry in record.log] == [entry.step for entry in expected.log]
    for part in ("loss", "cross_entropy", "distillation", "learning_rate"):
        found, wanted = ([getattr(entry, part) for entry in each.log] for each in (record, expected))
        assert found == pytest.approx(wanted, abs=tolerance)
    assert record.measured.nats.known() == pytest.approx(expected.measured.nats.known(), rel=1e-3)
    assert (record.settings, record.corpus) == (expected.settings, expected.corpus)


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_two_processes_recover_as_one(launcher, ended, whole):
    root, codes = ended
    assert codes[launcher] == 0, said(root, launcher)
    record = RecoveryRecord.read(root / launcher / RECOVERY)
    assert record.to_json() == json.loads(said(root, launcher, "out"))
    assert record.processes == 2
    same(record, whole[1])
    for line in ("kernels: PyTorch", "training 16,192 parameters for 8 steps", "recovering 8/8  loss "):
        assert said(root, launcher).count(line) == 1
    assert {path.name for path in (root / launcher).iterdir()} == {path.name for path in whole[0].iterdir()}
    assert not (root / f"{launcher}.training").exists()


@pytest.mark.parametrize("name", ["alone", "pair"])
def test_a_killed_recovery_goes_on_in_one_process_as_if_nothing_had_happened(
    name, ended, whole, pairs, text_file, monkeypatch
):
    """Killed between writing a checkpoint and marking it as whole: that one is not trusted."""
    root, codes = ended
    assert codes[name if name == "alone" else "pair-0"] == -signal.SIGKILL, said(root, next(iter(codes)))
    work = root / f"{name}.training" / "model"
    marked = {path.parent.name for path in work.glob(f"*/{WHOLE}")}
    assert (work / f"checkpoint-{DIE_AT}").exists()
    assert f"checkpoint-{DIE_AT - 2}" in marked
    assert f"checkpoint-{DIE_AT}" not in marked
    assert not (root / name).exists()
    given = {"teacher": pairs[NAME][0], "data": str(text_file), **TRAINING}
    with pytest.raises(slimstate.SlimstateError, match="`resume` goes on with it, `force` starts anew"):
        training_calls.recover(pairs[NAME][1], root / name, **given)
    lines: list[str] = []
    monkeypatch.setattr(slimstate.Reporter, "say", lambda self, line: lines.append(line))
    record = training_calls.recover(pairs[NAME][1], root / name, resume=True, **given)
    assert f"going on from {work / f'checkpoint-{DIE_AT - 2}'}" in lines
    same(record, whole[1])
    if name == "alone":
        assert [entry.loss for entry in record.log] == [entry.loss for entry in whole[1].log]
        for shard in whole[0].glob("*.safetensors"):
            assert (root / name / shard.name).read_bytes() == shard.read_bytes()
    assert not (root / f"{name}.training").exists()


@pytest.mark.parametrize("name", ["alone", "pair-0", "pair-1"])
def test_what_is_wrong_is_said_once_and_all_end_alike(name, ended):
    """Text that is not there is bad input; a loss that is no number ends a training, and keeps what it had."""
    root, _ = ended
    codes = [line for line in said(root, name, "out").splitlines() if line.startswith("exit ")]
    assert codes == ["exit 2", "exit 3"]
    out = name.partition("-")[0]
    complaints = [line for line in said(root, name).splitlines() if line.startswith("slimstate: ")]
    assert complaints[0] == "slimstate: no data at /nowhere/x.txt"
    work = root / f"{out}-nan.training" / "model"
    last = max(int(path.parent.name.partition("-")[2]) for path in work.glob(f"*/{WHOLE}"))
    wanted = f"NaN or infinite at step {last + 1}: the last good checkpoint is {work / f'checkpoint-{last}'}"
    assert wanted in complaints[1]
    assert said(root, name).count("kernels: ") == (0 if name == "pair-1" else 2)
    for missing in (f"{out}-nowhere", f"{out}-nowhere.training", f"{out}-nan"):
        assert not (root / missing).exists()


@pytest.mark.parametrize("kind", ["adapters", "full"])
def test_a_sharded_student_has_the_loss_and_gradients_of_a_whole_one(kind, ended):
    root, _ = ended
    assert (root / "sharded.pt").exists(), said(root, "pair-0")
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
