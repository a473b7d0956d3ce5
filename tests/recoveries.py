"""Short recoveries of tiny models, and what tests read from their folders."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import slimstate
import tiny
from slimstate.records.training import RecoveryRecord
from slimstate.training.adaptation import trainable
from slimstate.training.trainer import StudentTrainer

NAME, GATED = tiny.PLAIN
TIED = ("delta_net-tied", "gated_deltanet-tied")
ALONE = {"teacher": None, "no_teacher": True}
BRIEF = {"steps": 4, "length": 32, "batch_size": 4, "lr": 1e-2}
SHORT = {**BRIEF, "save_every": 2, "report_to": "none"}
PAPER = {"lora_targets": "q_proj,k_proj,v_proj", "unfreeze": "norms,biases"}
DEFAULT = {"lora": False}  # no option chooses what is trained
PARTS = {"full", "mixers", "lora", "lora_targets", "lora_rank", "lora_alpha", "unfreeze"}
Recover = Callable[..., RecoveryRecord]


class Listener(slimstate.Reporter):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


def confident(name: str, **changes: object) -> torch.nn.Module:
    """Return a model whose predictions are far from uniform, so that its cut has something to learn from it."""
    model = tiny.build(tiny.VARIANTS[name], **changes)
    with torch.no_grad():
        model.get_output_embeddings().weight.normal_(std=0.25)
    return model


def cut(folder: Path, out: Path, key_dim: int = 8) -> Path:
    slimstate.prune(folder, out, method="l1", key_dim=key_dim, progress=False)
    return out


def record_of(folder: Path) -> RecoveryRecord:
    return RecoveryRecord.read(folder / RecoveryRecord.FILE)


def history_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())["slimstate"]


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.name != "logits.pt"}


def weights_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def losses(record: RecoveryRecord) -> list[float]:
    return [entry.loss for entry in record.log]


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=tiny.token_ids(), use_cache=False).logits


def perturb(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Change all trained parameters at random, and return them."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trainable(model).values():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return {name: parameter.detach().clone() for name, parameter in trainable(model).items()}


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the gradients of a loss by the names of the trained parameters."""
    loss = model(input_ids=tiny.token_ids(2, 40), use_cache=False).logits.float().log_softmax(-1)[..., 0].mean()
    loss.backward()
    return {name: parameter.grad for name, parameter in trainable(model).items()}


def check_same(out: Path, expected: Path) -> None:
    """Check that two recoveries have the same files, losses, measurements and weights."""
    assert files_of(out) == files_of(expected)
    assert losses(record_of(out)) == losses(record_of(expected))
    assert record_of(out).measured == record_of(expected).measured
    assert weights_of(out) == weights_of(expected)


@contextmanager
def stop_at(step: int) -> Iterator[None]:
    """Interrupt the training in the block after this many steps."""
    training_step = StudentTrainer.training_step

    def stop(self, *args, **kwargs):
        if self.state.global_step == step:
            raise KeyboardInterrupt
        return training_step(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StudentTrainer, "training_step", stop)
        with pytest.raises(KeyboardInterrupt):
            yield


def interrupt(recover: Recover, out: Path, step: int = 3, name: str = NAME, **changes: object) -> Path:
    """Interrupt a recovery, and return its run folder."""
    with stop_at(step):
        recover(name, out, **changes)
    assert not out.exists()
    return out.with_name(f"{out.name}.training")
