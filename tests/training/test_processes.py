"""A training is the same with one process or several, and after it was killed and resumed."""

import json
import signal
from pathlib import Path

import pytest
import torch
from test_shared_filters import check_shared

import slimstate
import tiny
from launching import Program, free_port, options, start_ranks, wait_for_all
from places import TESTS
from recoveries import GATED, NAME, SHORT, Listener, losses, weights_of
from slimstate.records.training import RecoveryRecord, TrainingRecord
from slimstate.training.run_checkpoints import COMPLETE

pytestmark = pytest.mark.slow
LIGHT = "mamba2-plain"  # needs no fla, which takes ten seconds to load
SCRIPT = TESTS / "training_commands.py"
STEPS = 6
LONGER = {**SHORT, "steps": STEPS}
DIE_AT = 4


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    return tiny.write_shape(tmp_path_factory.mktemp("config") / "config.json", "delta_net")


@pytest.fixture(scope="module")
def results(pairs, config, text_file, tmp_path_factory) -> tuple[Path, dict[str | int, int]]:
    """Run everything that needs processes of its own at once; return the folder of the results, and the exit codes.

    `alone` is one process, `pair` are two as torchrun starts them; both run several commands, of which the last is
    killed. `accelerate` is the command, which starts two processes as the command torchrun does, but forks them.
    """
    root = tmp_path_factory.mktemp("results")

    def recover(out: str, name: str = NAME, **changes: object) -> list[str]:
        values = {"teacher": pairs[name][0], "data": text_file, "out": root / out, **LONGER, **changes}
        return ["recover", str(pairs[name][1]), *options(**values)]

    def killed(out: str, shard: tuple[Path, Path] | None = None, **before: list[str]) -> list[str]:
        bad = {"nowhere": {"data": "/nowhere/x.txt"}, "nan": {"lr": 1e30, "save_every": 1, "full": True}}
        commands = {**before, **{f"{out}-{name}": recover(f"{out}-{name}", **changes) for name, changes in bad.items()}}
        commands[out] = recover(out, lora=True)
        request = {"commands": commands, "die_at": DIE_AT, "shard": None if shard is None else list(map(str, shard))}
        return [str(SCRIPT), str(root), json.dumps(request)]

    train = ["train", str(config), *options(data=text_file, out=root / "trained", shared_filters="head", **LONGER)]
    complete = {"ranks": recover("ranks", lora=True, json=True, grad_accum=2), "trained": train}
    # what it has for CPUs needs MPI, so the processes are started as for GPUs, and find none
    accelerate = [
        TESTS / "forked_accelerate.py", "--multi_gpu", "--num_processes", 2, "--num_machines", 1,
        "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", free_port(),
        "-m", "slimstate", *recover("accelerate", LIGHT, json=True),
    ]  # fmt: skip
    streams = {"out": root / "accelerate.out", "err": root / "accelerate.err"}
    programs = {
        "alone": Program(*killed("alone"), err=root / "alone.err"),
        "accelerate": Program(*accelerate, **streams, fla=False),
        **dict(enumerate(start_ranks(2, root, *killed("pair", pairs[GATED], **complete)))),
    }
    return root, dict(zip(programs, wait_for_all(programs.values()), strict=True))


@pytest.fixture(scope="module")
def unbroken(recover, tmp_path_factory) -> dict[str, tuple[Path, RecoveryRecord]]:
    """Recoveries by one process without an interruption: one with adapters, one of all weights."""
    root = tmp_path_factory.mktemp("unbroken")
    return {name: (root / name, recover(name, root / name, steps=STEPS, lora=name == NAME)) for name in (NAME, LIGHT)}


def output_of(root: Path, name: str, stream: str = "err") -> str:
    """Return what all processes of a command wrote: one file for each, or one for both by `accelerate`."""
    files = (path for pattern in (f"{name}.{stream}", f"{name}.?.{stream}") for path in sorted(root.glob(pattern)))
    return "".join(path.read_text() for path in files)


def check_same(record: RecoveryRecord, expected: RecoveryRecord) -> None:
    assert [entry.step for entry in record.log] == [entry.step for entry in expected.log]
    for part in ("loss", "cross_entropy", "distillation", "learning_rate"):
        values = [[getattr(entry, part) for entry in each.log] for each in (record, expected)]
        assert values[0] == pytest.approx(values[1], abs=1e-4)
    assert record.measured.nats.by_name() == pytest.approx(expected.measured.nats.by_name(), rel=1e-3)
    assert (record.settings, record.corpus) == (expected.settings, expected.corpus)


@pytest.mark.parametrize(("launcher", "name"), [("ranks", NAME), ("accelerate", LIGHT)])
def test_two_processes_recover_as_one(launcher, name, results, unbroken):
    (root, codes), whole = results, unbroken[name]
    succeeded = codes["accelerate"] == 0 if launcher == "accelerate" else output_of(root, launcher, "code") == "00"
    assert succeeded, output_of(root, launcher)
    record = RecoveryRecord.read(root / launcher / RecoveryRecord.FILE)
    assert record.to_json() == json.loads(output_of(root, launcher, "out"))
    assert record.processes == 2
    check_same(record, whole[1])
    training = f"training {record.trained_parameters:,} parameters for {STEPS} steps"
    for line in ("kernels: PyTorch", training, f"recovering {STEPS}/{STEPS}  loss "):
        assert output_of(root, launcher).count(line) == 1
    assert {path.name for path in (root / launcher).iterdir()} == {path.name for path in whole[0].iterdir()}
    assert not (root / f"{launcher}.training").exists()


def test_two_processes_train_as_one(results, config, text_file, tmp_path):
    """Each works on half of every batch; the initial model and the tokens are written once."""
    root, _ = results
    assert output_of(root, "trained", "code") == "00", output_of(root, "trained")
    values = {"data": text_file, "shared_filters": "head", **LONGER}
    alone = slimstate.train(config, tmp_path / "alone", progress=False, **values)
    record = TrainingRecord.read(root / "trained" / TrainingRecord.FILE)
    assert record.processes == 2
    assert losses(record) == pytest.approx(losses(alone), rel=1e-4)
    check_shared(root / "trained", "head")
    assert record.config.items() >= {"command": "train", "shared_filters": "head", "lr": 0.01}.items()
    out = output_of(root, "trained.0", "out")
    assert "tokens/s" in out
    assert f"written to {root / 'trained'}" in out
    assert output_of(root, "trained.1", "out") == ""


@pytest.mark.parametrize("name", ["alone", "pair"])
def test_a_killed_recovery_continues_in_one_process_as_if_nothing_had_happened(name, results, unbroken, recover):
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
    listener = Listener()
    with pytest.raises(slimstate.SlimstateError, match="`resume` continues it, `force` starts over"):
        recover(NAME, root / name, steps=STEPS)
    record = recover(NAME, root / name, steps=STEPS, resume=True, progress=listener)
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
