"""Choose channels and cut them: what is asked for becomes a plan, and a plan becomes a folder.

Everything before `Plan` decides; everything after it executes.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimstate.axes import Evidence, Mixer, Plan, Selection
from slimstate.calibration import calibrate
from slimstate.card import write_card
from slimstate.checkpoint import CARD, PLAN, Checkpoint, check_output, described_mixers, write_checkpoint
from slimstate.data import Windows, sample_windows
from slimstate.errors import DataError, ModelError, PlanError
from slimstate.evidence import EvidenceFile
from slimstate.overview import parameters_after, state_bytes
from slimstate.record import versions
from slimstate.reporter import SILENT, Reporter
from slimstate.runtime import load, load_tokenizer, pick_device, pick_dtype, stock_shapes
from slimstate.selectors import Case, Need, Request, Selector, choose, selector_named
from slimstate.surgery import Cutter

ALIGNMENT = 16


def resolve_key_dim(width: int, compression: float | None, key_dim: int | None) -> tuple[int, str]:
    """The key dim that was asked for, and a line on how it came about."""
    if (compression is None) == (key_dim is None):
        raise PlanError("give either --compression or --key-dim")
    if key_dim is not None:
        if key_dim == width:
            raise PlanError(f"key dim {key_dim} is the width the model has: nothing to cut")
        if not 0 < key_dim < width:
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
    return (
        kept,
        asked
        if kept == exact
        else f"{asked}, rounded to key dim {kept}, a multiple of {ALIGNMENT} (--key-dim sets it exactly)",
    )


def prune(
    model: str | Path,
    out: str | Path | None = None,
    *,
    method: str = "drrqr",
    compression: float | None = None,
    key_dim: int | None = None,
    data: str | None = None,
    samples: int = 128,
    length: int = 2048,
    score: str = "kq",
    seed: int = 0,
    f: float = 1.5,
    device: str | None = None,
    dtype: str | None = None,
    evidence: str | Path | None = None,
    apply: str | Path | None = None,
    dry_run: bool = False,
    force: bool = False,
    reporter: Reporter = SILENT,
) -> dict[str, Any]:
    """Cut a model and write it to `out`; with `dry_run`, only say what would be done. Returns the record."""
    started = time.perf_counter()
    checkpoint = Checkpoint.open(model)
    if out is None and not dry_run:
        raise PlanError("give --out DIR, or --dry-run to write nothing")
    if out is not None:
        check_output(checkpoint, Path(out), force)
    if checkpoint.config.get("slimstate") is not None:
        earlier = checkpoint.config["slimstate"]
        reporter.say(f"cut before, from key dim {earlier['width']} to {earlier['key_dim']}; both cuts are recorded")
    check_stock_shapes(checkpoint)
    kernels = None
    if apply is not None:
        plan = read_plan(Path(apply), checkpoint)
        reporter.say(f"applying {apply}: {plan.method}, key dim {plan.key_dim} of {plan.width}")
    else:
        width = checkpoint.mixers[0].axis.width
        keep, line = resolve_key_dim(width, compression, key_dim)
        reporter.say(line)
        request = Request(keep=keep, score=score, seed=seed, f=f)
        gathered = gather_evidence(
            checkpoint,
            selector_named(method),
            data=data,
            samples=samples,
            length=length,
            seed=seed,
            device=device,
            dtype=dtype,
            path=None if evidence is None else Path(evidence),
            reporter=reporter,
        )
        kernels = None if gathered is None else gathered[1]
        plan = make_plan(checkpoint, method, request, None if gathered is None else gathered[0])
    record = describe(checkpoint, plan)
    record |= {"kernels": kernels, "out": None if dry_run or out is None else str(out)}
    if not dry_run and out is not None:
        record["left_out"] = apply_plan(checkpoint, plan, Path(out), force=force, reporter=reporter)
    record["seconds"] = time.perf_counter() - started
    return record


def gather_evidence(
    checkpoint: Checkpoint,
    selector: Selector,
    *,
    data: str | None,
    samples: int,
    length: int,
    seed: int,
    device: str | None,
    dtype: str | None,
    path: Path | None,
    reporter: Reporter,
) -> tuple[EvidenceFile, str | None] | None:
    """What the selector needs, from a file or by running the model, and the kernels that ran; None if it needs none."""
    needs = frozenset(selector.needs - {"weight"})
    pick_dtype(dtype, pick_device(device))
    if not needs:
        return None
    found = EvidenceFile.open(path) if path is not None and path.exists() else None
    windows: Windows | None = None
    if data is not None:
        windows = sample_windows(load_tokenizer(checkpoint.folder), data, samples=samples, length=length, seed=seed)
    if found is not None and path is not None:
        found.check(path, checkpoint.fingerprint, None if windows is None else windows.digest)
        needs = frozenset(needs & set(found.missing(needs)))  # type: ignore[arg-type]
        if not needs:
            size = f"{found.calibration['samples']} x {found.calibration['length']} tokens"
            reporter.say(f"evidence: {path}, {size}; no forward pass")
            return found, None
        if windows is None:
            lacking = " and ".join(sorted(needs))
            raise DataError(f"{path} holds no {lacking} evidence, which {selector.name} needs: give --data too")
    if windows is None:
        raise PlanError(f"{selector.name} looks at activations: give text to calibrate on with --data")
    if path is not None and found is None:
        needs |= {"gram", "input"}  # cheap in the same pass, and the file then serves the other methods too
    runtime = load(checkpoint.folder, device=device, dtype=dtype)
    reporter.say(f"kernels: {runtime.kernels}")
    evidence = calibrate(runtime, checkpoint.mixers, windows.tokens, needs, reporter)
    fresh = EvidenceFile(model=checkpoint.fingerprint, calibration=windows.describe(), evidence=evidence)
    whole = fresh if found is None else found.extended(fresh)
    if path is not None:
        whole.save(path)
        reporter.say(f"evidence saved to {path}")
    return whole, runtime.kernels


def make_plan(checkpoint: Checkpoint, method: str, request: Request, gathered: EvidenceFile | None) -> Plan:
    """The channels every mixer keeps, with all it takes to repeat and to judge the choice."""
    selector = selector_named(method)
    evidence = {} if gathered is None else gathered.evidence
    selections = choose(method, _cases(checkpoint, selector.needs, evidence), request)
    chosen = {
        mixer.layer: _certified(selection, evidence.get(mixer.layer))
        for mixer, selection in zip(checkpoint.mixers, selections, strict=True)
    }
    return Plan(
        model_type=checkpoint.family.model_type,
        width=checkpoint.mixers[0].axis.width,
        key_dim=request.keep,
        method=method,
        score=request.score,
        seed=request.seed,
        options={name: getattr(request, name) for name in selector.options},
        model={"source": checkpoint.source, "fingerprint": checkpoint.fingerprint},
        calibration=None if gathered is None else dict(gathered.calibration),
        versions=versions(),
        selections=chosen,
        parent=_parent_plan(checkpoint),
    )


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


def _certified(selection: Selection, evidence: Evidence | None) -> Selection:
    """With the condition number of the keys before and after, where their Gram matrix is known."""
    if evidence is None or evidence.key_gram is None:
        return selection
    claims = {
        "condition_before": condition_numbers(evidence.key_gram),
        "condition_after": condition_numbers(_kept(evidence.key_gram, selection.keep)),
    }
    return Selection(keep=selection.keep, certificate={**selection.certificate, **claims})


def _kept(gram: Tensor, keep: Tensor) -> Tensor:
    rows = gram.gather(1, keep.unsqueeze(2).expand(-1, -1, gram.shape[2]))
    return rows.gather(2, keep.unsqueeze(1).expand(-1, keep.shape[1], -1))


def condition_numbers(gram: Tensor) -> list[float | None]:
    """kappa of the matrix behind each Gram matrix [H, D, D]; None where it is singular to working precision."""
    values = torch.linalg.eigvalsh(gram.double())
    smallest, largest = values[:, 0], values[:, -1]
    singular = smallest <= largest * gram.shape[-1] * torch.finfo(torch.float64).eps
    kappa = (largest / smallest.clamp_min(torch.finfo(torch.float64).tiny)).sqrt()
    return [None if bad else float(k) for bad, k in zip(singular.tolist(), kappa.tolist(), strict=True)]


def _parent_plan(checkpoint: Checkpoint) -> dict[str, Any] | None:
    path = checkpoint.folder / PLAN
    if checkpoint.config.get("slimstate") is None or not path.is_file():
        return None
    return dict(json.loads(path.read_text(encoding="utf-8")))


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
    return plan


def check_stock_shapes(checkpoint: Checkpoint) -> None:
    """Every tensor the stock class would make of the config is there, in that shape."""
    expected, dispensable = stock_shapes(checkpoint.config)
    for name, shape in expected.items():
        info = checkpoint.tensors.get(name)
        if info is None:
            if name in dispensable:
                continue
            raise ModelError(f"{checkpoint.folder} has no tensor {name}, which its config asks for")
        if list(info.shape) != shape:
            raise ModelError(f"{checkpoint.folder}: {name} is {list(info.shape)} where the config says {shape}")


def cut_config(checkpoint: Checkpoint, plan: Plan) -> dict[str, Any]:
    """The config of the cut model, with what was done under the key `slimstate`."""
    config = checkpoint.family.resize(checkpoint.config, plan.key_dim)
    previous = checkpoint.config.get("slimstate")
    config["slimstate"] = {
        "version": plan.versions.get("slimstate"),
        "base_model": plan.model["source"],
        "base_fingerprint": plan.model["fingerprint"],
        "method": plan.method,
        "score": plan.score,
        "width": plan.width,
        "key_dim": plan.key_dim,
        "history": [] if previous is None else [*previous.get("history", []), _without_history(previous)],
    }
    return config


def _without_history(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key != "history"}


def apply_plan(
    checkpoint: Checkpoint, plan: Plan, out: Path, *, force: bool = False, reporter: Reporter = SILENT
) -> list[str]:
    """Write the model that the plan describes; returns the files that were left out."""
    cutter = Cutter(checkpoint.mixers, plan.selections)
    config = cut_config(checkpoint, plan)
    _check_result(checkpoint, cutter, config)
    record = describe(checkpoint, plan)
    states, parameters = record["state_bytes"], record["parameters"]
    card = write_card(
        plan,
        out.name,
        (states["before"]["fp32"], states["after"]["fp32"]),
        (parameters["before"], parameters["after"]),
        config["slimstate"]["history"],
    )
    documents = {PLAN: plan.to_json() + "\n", CARD: card}
    return write_checkpoint(checkpoint, cutter, config, documents, out, force=force, reporter=reporter)


def _check_result(checkpoint: Checkpoint, cutter: Cutter, config: Mapping[str, Any]) -> None:
    """Before anything is written: what will be on disk is what the stock class makes of the new config."""
    expected, _ = stock_shapes(config)
    for name, info in checkpoint.tensors.items():
        after = cutter.shape(name, info.shape)
        if name in expected and expected[name] != after:
            raise AssertionError(f"{name} would be {after} where the stock class makes {expected[name]}")


def describe(checkpoint: Checkpoint, plan: Plan) -> dict[str, Any]:
    """What the cut changes, in numbers."""
    mixers: tuple[Mixer, ...] = described_mixers(checkpoint.config)
    return {
        "model": checkpoint.source,
        "model_type": plan.model_type,
        "method": plan.method,
        "score": plan.score,
        "width": plan.width,
        "key_dim": plan.key_dim,
        "compression": plan.compression,
        "state_bytes": {"before": state_bytes(mixers, plan.width), "after": state_bytes(mixers, plan.key_dim)},
        "parameters": {"before": checkpoint.parameters, "after": parameters_after(checkpoint, plan.key_dim)},
        "calibration": plan.calibration,
        "certificate": plan.summary(),
        "versions": dict(plan.versions),
    }
