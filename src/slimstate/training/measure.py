"""Measure a model before and after its training on windows that were not trained on."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from slimstate.checkpoints.reader import Checkpoint
from slimstate.checkpoints.safetensors_io import DTYPES
from slimstate.evaluation.perplexity import mean_nats, perplexity_of
from slimstate.models.load import Runtime, load
from slimstate.models.options import RunOptions
from slimstate.records.training import Measurements, Nats
from slimstate.system.progress import Reporter
from slimstate.training.tokens import Tokens

MIN_GAP = 0.01  # nats per token; a share of a smaller gap says nothing


def measure(
    student: Checkpoint, weights: Mapping[str, Tensor], tokens: Tokens, run: RunOptions,
    teacher: Checkpoint | None, control: Nats | None, reporter: Reporter,
) -> Measurements:  # fmt: skip
    """Return the mean nats of the student before and after, of the uncut model, and of its control.

    `weights` are those that training changed; they are measured as they will be stored. `control` was measured on the
    same tokens, before and after the training of the uncut model.
    """

    def nats_of(runtime: Runtime, stage: str) -> float:
        return mean_nats(runtime, tokens.held_out, reporter, f"measuring {stage}")

    def load_model(checkpoint: Checkpoint) -> Runtime:
        return load(checkpoint.folder, device=run.device, dtype=run.precision_name)

    runtime = load_model(student)
    before = nats_of(runtime, "before")
    as_stored = {
        name: tensor.to(DTYPES[student.tensors[stored[0]].dtype])
        for name, tensor in weights.items()
        if (stored := student.stored_names(name))
    }
    runtime.model.load_state_dict(as_stored, strict=False)
    after = nats_of(runtime, "after")
    if control is not None:
        return in_all_units(Nats(before=before, after=after, uncut=control.before, control=control.after), tokens)
    if teacher is not None and teacher.fingerprint != student.fingerprint:
        uncut = nats_of(load_model(teacher), "the uncut model")
        return in_all_units(Nats(before=before, after=after, uncut=uncut), tokens)
    return in_all_units(Nats(before=before, after=after), tokens)


def in_all_units(nats: Nats, tokens: Tokens) -> Measurements:
    """Return the nats with perplexities, bits per byte, and the shares of the gaps that were closed."""
    known, size = nats.known(), tokens.size
    units = {name: size.scores(value) for name, value in known.items()}
    return Measurements(
        text=tokens.measured_on,
        tokens=size.tokens,
        words=size.words,
        bytes=size.bytes,
        nats=nats,
        perplexity={name: perplexity_of(value) for name, value in known.items()},
        word_perplexity={name: unit.word_perplexity for name, unit in units.items()},
        bits_per_byte={name: unit.bits_per_byte for name, unit in units.items()},
        closed={goal: share_closed(nats, known[goal]) for goal in ("uncut", "control") if goal in known},
    )


def share_closed(nats: Nats, goal: float) -> float | None:
    """Return how much of the gap between the cut model and `goal` was closed; None of a gap that is too small."""
    gap = nats.before - goal
    return (nats.before - nats.after) / gap if gap > MIN_GAP else None
