"""What a sweep has found: read again to go on with it, and the point it recommends."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path

from slimstate.core.state_dtype import SERVED
from slimstate.evaluation.perplexity import TextSize
from slimstate.records.evaluation import TaskData
from slimstate.records.parts import Text
from slimstate.records.provenance import command_line, run_config
from slimstate.records.schema import ValidationError
from slimstate.records.sweep import UNCUT, Recommendation, Row, SweepRecord, SweepSettings
from slimstate.system.errors import DataError
from slimstate.system.json_files import read_json

SWEEP, EVIDENCE, CANDIDATES = "sweep.json", "evidence.safetensors", "candidates"
ENGINE_OPTION = "mamba-ssm-cache-dtype"  # what vLLM calls the type of its states
WAY_OUT = "choose another `out` or remove it"


def earlier_sweep(path: Path, settings: SweepSettings) -> SweepRecord | None:
    """What an interrupted sweep with the same settings has measured already; None where there was none."""
    if not path.exists():
        return None
    try:
        found = SweepRecord.from_json(read_json(path, DataError))
    except ValidationError as error:
        raise DataError(f"{path} is not a sweep that can go on ({error}): {WAY_OUT}") from error
    if not _is_whole(found):
        raise DataError(f"{path} is not a sweep that can go on (numbers are missing): {WAY_OUT}")
    different = [
        "model" if item.name == "fingerprint" else item.name
        for item in fields(SweepSettings)
        if _essence(getattr(found.settings, item.name)) != _essence(getattr(settings, item.name))
    ]
    if different:
        raise DataError(f"{path} is a sweep with another {', '.join(different)}: {WAY_OUT}")
    return found


def _essence(setting: object) -> object:
    """What of a setting decides a result: of a text its tokens, of files their bytes, not where they lie."""
    if isinstance(setting, Mapping):
        return {name: _essence(part) for name, part in setting.items()}
    if isinstance(setting, TaskData):
        return setting.digest or setting.path
    return setting.digest if isinstance(setting, Text) else setting


def _is_whole(found: SweepRecord) -> bool:
    """Whether every number that a sweep measures is there; a page can be made of less."""
    numbers = [found.uncut.nats_per_token]
    for row in found.rows:
        numbers += [row.perplexity, row.nats_per_token, row.rank_utilisation, row.nats_over_uncut]
    return None not in numbers


def in_all_units(found: SweepRecord | None, size: TextSize) -> SweepRecord | None:
    """Rows of 0.1 know only nats per token; what those are per word and byte follows from the same text."""
    if found is None or found.uncut.words is not None or found.uncut.nats_per_token is None:
        return found
    return replace(
        found,
        uncut=replace(found.uncut, **vars(size.predicted(found.uncut.nats_per_token))),
        rows=tuple(
            row if row.nats_per_token is None else replace(row, **vars(size.predicted(row.nats_per_token)))
            for row in found.rows
        ),
    )


def recommend(record: SweepRecord, max_loss: float, folder: Path, model: str) -> Recommendation:
    """The smallest state in bytes whose loss is within `max_loss`; where none is, the mildest loss, said to be none.

    What no engine can keep yet is not recommended, unless nothing else was measured.
    """
    rows = [row for row in record.rows if row.state_dtype in SERVED] or list(record.rows)
    within = [row for row in rows if _loss(row) <= max_loss]
    chosen = min(within, key=lambda row: (row.state_bytes, _loss(row))) if within else min(rows, key=_loss)
    share = 1 - chosen.state_bytes / record.uncut.state_bytes
    cost = f"{share:.0%} less state for {_loss(chosen):+.3f} nats per token"
    kept = "" if chosen.state_dtype == "float32" else f", its state kept in {chosen.state_dtype}"
    cut = "no cut" if chosen.method == UNCUT else f"{chosen.method} at key dim {chosen.key_dim}"
    what = f"{cut}{kept}: {cost}"
    if within:
        reason = f"{what}, the smallest state within {max_loss:g} nats of the uncut model"
    else:
        none = "no cut" if record.state_dtypes == ("float32",) else "nothing"
        reason = f"{none} stays within {max_loss:g} nats of the uncut model; the mildest is {what}"
    return Recommendation(
        row=record.rows.index(chosen),
        within=bool(within),
        max_loss=max_loss,
        reason=reason,
        command=_served(model, chosen) if chosen.method == UNCUT else _pruned(record, chosen, folder, model),
    )


def _served(model: str, chosen: Row) -> str:
    """What makes an engine keep the states of a model in another type."""
    return shlex.join(["vllm", "serve", model, f"--{ENGINE_OPTION}", chosen.state_dtype])


def _pruned(record: SweepRecord, chosen: Row, folder: Path, model: str) -> str:
    """What makes the cut of a row."""
    options = {
        "out": "SLIM",
        "method": chosen.method,
        "key_dim": chosen.key_dim,
        "score": chosen.score,
        "seed": record.settings.seed,
        "rrqr_f": record.settings.f,
        "keep_norm_eps": record.settings.keep_norm_eps,
        "evidence": folder / EVIDENCE if record.settings.calibration else None,
        **reconstruction_flags(record.settings),
    }
    if record.settings.reconstruct is not None and record.settings.calibration is not None:
        text = record.settings.calibration
        options |= {"data": text.data, "documents": text.documents, "samples": text.samples, "length": text.length}
    return command_line(run_config("prune", {"model": model}, options))


def reconstruction_flags(settings: SweepSettings) -> dict[str, object]:
    """What makes a cut, or another sweep, reconstruct as this one did."""
    if settings.reconstruct is None:
        return {}
    told = {f"reconstruct_{name}": value for name, value in vars(settings.reconstruct).items() if name != "seed"}
    return {"reconstruct": True, **told}


def _loss(row: Row) -> float:
    """Nats per token over the uncut model; what was not measured is never recommended."""
    return math.inf if row.nats_over_uncut is None else row.nats_over_uncut
