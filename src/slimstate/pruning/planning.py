"""Decide what to keep: how many channels, on what evidence, and which ones. Ends in a `Plan`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import torch
from torch import Tensor

from slimstate.checkpoints.reader import Checkpoint
from slimstate.core.effective_rank import gram_condition_number
from slimstate.core.evidence import Evidence, EvidenceFile
from slimstate.core.layout import Axis, Mixer
from slimstate.core.plan import PLAN, Basis, Choice, Plan
from slimstate.core.surgery import check_choice
from slimstate.data.text import Windows, sample_windows
from slimstate.families import loader_of
from slimstate.models.devices import pick_device, pick_dtype
from slimstate.models.load import Runtime, load, load_tokenizer
from slimstate.models.offload import load_spread, parse_limits
from slimstate.pruning.budget import Budget
from slimstate.pruning.calibration import calibrate
from slimstate.records.base import versions
from slimstate.selectors import ROTATIONS, SELECTORS, Case, Need, Request, Selector, choose, selector_named
from slimstate.system import distributed, threads
from slimstate.system.errors import DataError, PlanError
from slimstate.system.json_files import plain
from slimstate.system.progress import SILENT, Reporter

ALIGNMENT = 16


def decide_key_dim(
    mixers: tuple[Mixer, ...],
    compression: float | None,
    key_dim: int | None,
    budget: Budget | None,
    *,
    whole: bool = False,
) -> tuple[int, str]:
    """The key dim that was asked for, or the largest that fits a budget, and a line on how it came about.

    `whole` allows the width itself.
    """
    width = mixers[0].axis.width
    if budget is None:
        return resolve_key_dim(width, compression, key_dim, whole=whole)
    if compression is not None or key_dim is not None:
        raise PlanError("a budget says how much is kept: leave out --compression and --key-dim")
    chosen, line = budget.choose(mixers)
    if chosen == width:
        raise PlanError(f"{line}; nothing to cut")
    return chosen, line


def resolve_key_dim(
    width: int, compression: float | None, key_dim: int | None, *, whole: bool = False
) -> tuple[int, str]:
    """The key dim that was asked for, and a line on how it came about; `whole` allows the width itself."""
    if (compression is None) == (key_dim is None):
        raise PlanError("give either --compression or --key-dim, or a budget (--state-mb, --sequences)")
    if key_dim is not None:
        if key_dim == width and not whole:
            raise PlanError(f"key dim {key_dim} is the width the model has: nothing to cut")
        if not 0 < key_dim <= width:
            raise PlanError(f"key dim {key_dim}: it must be at least 1 and less than the width {width}")
        return key_dim, f"key dim {key_dim} of {width}"
    assert compression is not None
    if not 0 < compression < 1:
        raise PlanError(f"compression {compression}: it must lie between 0 and 1; 0.5 removes half of the channels")
    exact = width * (1 - Fraction(str(compression)))
    asked = f"compression {compression:g} of {width} channels keeps {float(exact):g}"
    if width <= ALIGNMENT:
        kept = min(max(1, math.floor(exact + Fraction(1, 2))), width - 1)
        if not 0 < kept < width:
            raise PlanError(f"a width of {width} cannot be cut")
        return kept, f"{asked}; key dim {kept}, too narrow for a multiple of {ALIGNMENT}"
    nearest = math.floor(exact / ALIGNMENT + Fraction(1, 2)) * ALIGNMENT
    kept = min(max(nearest, ALIGNMENT), (width - 1) // ALIGNMENT * ALIGNMENT)
    rounding = f", rounded to key dim {kept}, a multiple of {ALIGNMENT}"
    return kept, asked if kept == exact else asked + rounding


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Which text to run through the model, where and how, and the file that keeps or holds the result."""

    data: str | None = None
    samples: int = 128
    length: int = 2048
    seed: int = 0
    device: str | None = None
    dtype: str | None = None
    path: Path | None = None
    device_map: str | None = None
    max_memory: str | None = None

    def __post_init__(self) -> None:
        pick_dtype(self.dtype, pick_device(self.device))
        if self.device_map not in (None, "auto"):
            raise PlanError(f"unknown device map {self.device_map!r}; there is auto")
        if self.max_memory is not None and self.device_map is None:
            raise PlanError("--max-memory limits what --device-map auto takes: give both")
        parse_limits(self.max_memory)

    def load(self, folder: Path) -> Runtime:
        """The model, where and how it is to run."""
        if self.device_map is None:
            return load(folder, device=self.device, dtype=self.dtype)
        return load_spread(folder, device=self.device, dtype=self.dtype, limits=parse_limits(self.max_memory))


def read_windows(
    checkpoint: Checkpoint, selector: Selector, calibration: Calibration, reporter: Reporter = SILENT
) -> Windows | None:
    """The calibration tokens; None where no text was given and none is needed."""
    check_rotatable(checkpoint, selector.name)
    if not selector.calibrated:
        return None
    if calibration.data is None:
        if calibration.path is None or not calibration.path.exists():
            raise PlanError(f"{selector.name} looks at activations: give text to calibrate on with --data")
        return None
    with reporter.waiting(f"reading {calibration.data}"):
        return sample_windows(
            load_tokenizer(checkpoint.folder),
            calibration.data,
            samples=calibration.samples,
            length=calibration.length,
            seed=calibration.seed,
        )


@contextmanager
def _waking_linear_algebra(axis: Axis, device: torch.device, needs: frozenset[Need]) -> Iterator[None]:
    """Beside the body, a first Gram matrix and its factors on a GPU, which load libraries; both are awaited.

    Loading them, up to most of a second, must be over before there is another one.
    """
    if device.type == "cpu" or "gram" not in needs:
        yield
        return

    def first() -> Tensor:
        activations = torch.zeros(axis.heads, 2048, axis.width, dtype=torch.float64, device=device)
        gram = activations.mT @ activations
        return torch.linalg.cholesky(gram + torch.eye(axis.width).to(gram))

    done = threads.beside(first)
    try:
        yield
    finally:
        with suppress(RuntimeError):  # the one that counts will say so
            done()


def gather_evidence(
    checkpoint: Checkpoint,
    needs: frozenset[Need],
    calibration: Calibration,
    windows: Windows | None,
    reporter: Reporter = SILENT,
    runtime: Runtime | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> tuple[EvidenceFile | None, str | None]:
    """What is needed, from a file or by running the model, and the kernels that ran, if any did.

    The model is loaded only where it must run and is not at hand as `runtime`; `meanwhile` begins what can be done
    while it runs. Of several processes the main one saves the file, after all have looked for it.
    """
    needs, path = needs - {"weight"}, calibration.path
    if not needs:
        return None, None
    found = None
    if path is not None and path.exists():
        found = EvidenceFile.open(path)
        with reporter.waiting("reading the weights for their fingerprint"):
            found.check(path, checkpoint.fingerprint, None if windows is None else windows.digest)
        needs = found.missing(needs)
        if not needs:
            size = f"{found.calibration['samples']} x {found.calibration['length']} tokens"
            reporter.say(f"evidence: {path}, {size}; no forward pass")
            return found, None
    elif path is not None:
        needs |= {"gram", "input"}  # cheap in the same pass, and the file then serves the other methods too
    if windows is None:
        lacking = " and ".join(sorted(needs))
        raise DataError(f"{path} holds no {lacking} evidence, which is needed here: give --data too")
    hashing = threads.beside(lambda: checkpoint.fingerprint)  # the disk is read while the device works
    if runtime is None:
        axis, device = checkpoint.mixers[0].axis, pick_device(calibration.device)
        with reporter.waiting("loading the model"), _waking_linear_algebra(axis, device, needs):
            runtime = calibration.load(checkpoint.folder)
        reporter.say(f"kernels: {runtime.kernels}")
    meanwhile()
    evidence = calibrate(runtime, checkpoint.mixers, windows.tokens, needs, reporter)
    with reporter.waiting("reading the weights for their fingerprint"):
        fresh = EvidenceFile(model=hashing(), calibration=windows.describe(), evidence=evidence)
    whole = fresh if found is None else found.extended(fresh)
    if path is not None:
        distributed.from_main(lambda: whole.save(path))
        reporter.say(f"evidence saved to {path}")
    return whole, runtime.kernels


def make_plan(
    checkpoint: Checkpoint,
    method: str,
    request: Request,
    gathered: EvidenceFile | None = None,
    *,
    corrected: bool = True,
    reporter: Reporter = SILENT,
) -> Plan:
    """The channels every mixer keeps, with all it takes to repeat and to judge the choice."""
    selector = selector_named(method)
    check_rotatable(checkpoint, method)
    evidence = {} if gathered is None else gathered.evidence
    cases = reporter.track(_cases(checkpoint, selector.needs, evidence), "choosing", len(checkpoint.mixers))
    selections = choose(method, cases, request)
    with reporter.waiting("reading the weights for their fingerprint"):
        fingerprint = checkpoint.fingerprint
    layers = [mixer.layer for mixer in checkpoint.mixers]
    with threads.one_for_each_core() as pool:  # an eigenvalue problem for every head
        certified = pool.map(_certified, selections, map(evidence.get, layers))
        chosen = dict(zip(layers, certified, strict=True))
    correction, width = checkpoint.family.correction(checkpoint.config), checkpoint.mixers[0].axis.width
    corrected = corrected and correction.possible
    return Plan(
        model_type=checkpoint.family.model_type,
        width=width,
        key_dim=request.keep,
        method=method,
        score=request.score,
        seed=request.seed,
        corrected=corrected,
        options={name: getattr(request, name) for name in selector.options},
        model={
            "source": checkpoint.source,
            "fingerprint": fingerprint,
            "loader": loader_of(checkpoint.family.model_type).to_json(),
        },
        calibration=None if gathered is None else dict(gathered.calibration),
        versions=versions(),
        selections=chosen,
        parent=checkpoint.plan,
        correction=correction.describe(width, request.keep, corrected, rotated=method in ROTATIONS),
    )


def check_rotatable(checkpoint: Checkpoint, method: str) -> None:
    """Refuse a rotation of a model whose channels cannot be rotated, before the work that would be lost."""
    if method in ROTATIONS and any(mixer.noncommuting is None for mixer in checkpoint.mixers):
        model_type, others = checkpoint.family.model_type, ", ".join(SELECTORS)
        raise PlanError(f"{method} rotates the channels, which those of {model_type} cannot be; use one of {others}")


def _cases(checkpoint: Checkpoint, needs: frozenset[Need], evidence: Mapping[int, Evidence]) -> Iterator[Case]:
    for mixer in checkpoint.mixers:
        weights = (
            [checkpoint.read_rows(mixer, slot) for slot in (mixer.query, mixer.key)]
            if "weight" in needs
            else [None, None]
        )
        yield Case(
            heads=mixer.axis.heads,
            width=mixer.axis.width,
            query_weight=weights[0],
            key_weight=weights[1],
            evidence=evidence.get(mixer.layer),
        )


def _certified(selection: Choice, evidence: Evidence | None) -> Choice:
    """With the condition number of the keys before and after, where their Gram matrix is known."""
    if evidence is None or evidence.key_gram is None:
        return selection
    claims = {
        "condition_before": plain(gram_condition_number(evidence.key_gram)),
        "condition_after": plain(gram_condition_number(_kept(evidence.key_gram, selection))),
    }
    return replace(selection, certificate={**selection.certificate, **claims})


def _kept(gram: Tensor, choice: Choice) -> Tensor:
    """The Gram matrix of what is kept."""
    if isinstance(choice, Basis):
        rotation = choice.rows.to(gram)
        return rotation @ gram @ rotation.mT
    keep = choice.keep
    rows = gram.gather(1, keep.unsqueeze(2).expand(-1, -1, gram.shape[2]))
    return rows.gather(2, keep.unsqueeze(1).expand(-1, keep.shape[1], -1))


def read_plan(path: Path, checkpoint: Checkpoint) -> Plan:
    """A plan from a file or from the folder of a cut model; it must be for this very model."""
    path = path / PLAN if path.is_dir() else path
    try:
        plan = Plan.from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"cannot read plan {path}: {error}") from error
    if plan.model["fingerprint"] != checkpoint.fingerprint:
        raise PlanError(
            f"{path} is a plan for another model: {plan.model['source']}, {plan.model['fingerprint'][:19]}…"
        )
    layers = {mixer.layer for mixer in checkpoint.mixers}
    if plan.selections.keys() != layers:
        raise PlanError(f"{path} covers layers {sorted(plan.selections)}, the model has {sorted(layers)}")
    for mixer in checkpoint.mixers:
        choice = plan.selections[mixer.layer]
        check_choice(mixer, choice)
        if (choice.kept, mixer.axis.width) != (plan.key_dim, plan.width):
            raise PlanError(
                f"{path} says key dim {plan.key_dim} of {plan.width}, and keeps {choice.kept} of the"
                f" {mixer.axis.width} channels of layer {mixer.layer}"
            )
    return plan
