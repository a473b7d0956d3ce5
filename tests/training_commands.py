"""Run commands one after another, in one process or several; the last of them is killed.

Arguments: the folder for results, and JSON with `commands` (lists of words by name), `shard` (a model and its cut, or
null) and `die_at` (the step at whose checkpoint the last command is killed, before it is marked as complete).
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard

import tiny
from recoveries import perturb
from slimstate.checkpoints.reader import Checkpoint
from slimstate.cli import main
from slimstate.models.load import load
from slimstate.system import distributed
from slimstate.training import trainer
from slimstate.training.adaptation import Adaptation, trainable
from slimstate.training.options import AdaptationOptions
from slimstate.training.teacher import LiveTeacher


def student(uncut: Path, cut: Path, full: bool) -> trainer.Student:
    """Return a student in the middle of its training; before, its adapters would hardly have gradients."""
    torch.manual_seed(0)
    checkpoint = Checkpoint.open(cut)
    adaptation = Adaptation.of(checkpoint.config, checkpoint.mixers, AdaptationOptions(full=full))
    adapted = adaptation.attach(load(cut, device="cpu").model)
    perturb(adapted)
    teacher = LiveTeacher(runtime=load(uncut, device="cpu"))
    return trainer.Student(adapted, teacher, temperature=3.0, weight=0.5).train()


def shard(uncut: Path, cut: Path, root: Path) -> None:
    """Store the loss and gradients of two windows in each process, sharded, and those of all windows unsharded."""
    distributed.join(torch.device("cpu"))
    ids, places = tiny.token_ids(2 * distributed.count(), 40), torch.arange(2 * distributed.count())
    mine = slice(2 * distributed.rank(), 2 * distributed.rank() + 2)
    results: dict[str, Any] = {}
    for full in (False, True):
        whole, sharded = student(uncut, cut, full), student(uncut, cut, full)
        blocks = [part for part in sharded.modules() if type(part).__name__ in sharded._no_split_modules]
        for part in (*blocks, sharded):
            fully_shard(part)
        expected = whole(ids, places)["loss"]
        loss = sharded(ids[mine], places[mine])["loss"]
        expected.backward()
        loss.backward()
        mean = distributed.sum_over_all(loss.detach()) / distributed.count()
        theirs = {name: parameter.grad for name, parameter in trainable(whole).items()}
        ours = {name: parameter.grad.full_tensor() for name, parameter in trainable(sharded).items()}
        state = {name: tensor.full_tensor() for name, tensor in sharded.state_dict().items()}
        results["full" if full else "adapters"] = {
            "blocks": len(blocks), "losses": (mean, expected.detach()), "gradients": (ours, theirs),
            "states": (state, whole.state_dict()),
        }  # fmt: skip
    if distributed.is_main():
        torch.save(results, root / "sharded.pt")


def die_at(step: int) -> None:
    mark = trainer.TrainingCallback.on_save

    def on_save(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        mark(self, args, state, control, **kwargs)

    trainer.TrainingCallback.on_save = on_save


def follow(root: Path, name: str, words: list[str]) -> None:
    """Run a command; its output and exit code go to files named after it and the rank of this process."""
    place = f"{name}.{distributed.rank()}"
    for stream, suffix in ((sys.stdout, "out"), (sys.stderr, "err")):
        stream.flush()
        with (root / f"{place}.{suffix}").open("wb") as file:
            os.dup2(file.fileno(), stream.fileno())
    sys.argv = ["slimstate", *words]
    try:
        main()
    except SystemExit as stop:
        (root / f"{place}.code").write_text(str(stop.code or 0))


if __name__ == "__main__":
    root, request = Path(sys.argv[1]), json.loads(sys.argv[2])
    if request["shard"] is not None:
        shard(*map(Path, request["shard"]), root)
    for number, (name, words) in enumerate(request["commands"].items(), start=1):
        if number == len(request["commands"]):
            die_at(request["die_at"])
        follow(root, name, words)
