"""Results of a sweep: those of an interrupted one, and the row to recommend."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path

from slimstate.core.state_dtype import SERVED
from slimstate.records.evaluation import UNCUT, Recommendation, Row, SweepRecord, SweepSettings, TaskData
from slimstate.records.parts import Text
from slimstate.records.schema import ValidationError
from slimstate.system.errors import DataError
from slimstate.system.json_files import read_json

HINT = "choose another `out` or remove it"


def read_earlier(path: Path, settings: SweepSettings) -> SweepRecord | None:
    """Return what an interrupted sweep with the same settings has measured, or None where there was none."""
    if not path.exists():
        return None
    try:
        record = SweepRecord.from_json(read_json(path, DataError))
    except ValidationError as error:
        raise DataError(f"{path} is not a sweep that can be continued ({error}): {HINT}") from error
    if not _is_complete(record):
        raise DataError(f"{path} is not a sweep that can be continued (numbers are missing): {HINT}")
    different = [
        "model" if item.name == "fingerprint" else item.name
        for item in fields(SweepSettings)
        if _content(getattr(record.settings, item.name)) != _content(getattr(settings, item.name))
    ]
    if different:
        raise DataError(f"{path} is a sweep with another {', '.join(different)}: {HINT}")
    return record


def _content(setting: object) -> object:
    """Return the part of a setting that decides a result: of texts and files their digest, not their path."""
    if isinstance(setting, Mapping):
        return {name: _content(part) for name, part in setting.items()}
    if isinstance(setting, TaskData):
        return setting.digest or setting.path
    return setting.digest if isinstance(setting, Text) else setting


def _is_complete(record: SweepRecord) -> bool:
    """Return whether every number that a sweep measures is there; a report can do with fewer."""
    numbers = [record.uncut.nats_per_token]
    for row in record.rows:
        numbers += [row.perplexity, row.nats_per_token, row.rank_utilisation, row.nats_over_uncut]
    return None not in numbers


def recommend(record: SweepRecord, max_loss: float, command: Callable[[Row], str]) -> Recommendation:
    """Recommend the smallest state in bytes whose loss is within `max_loss`, or else the row with the smallest loss.

    Data types that no engine supports yet are not recommended, unless nothing else was measured.
    """
    rows = [row for row in record.rows if row.state_dtype in SERVED] or list(record.rows)
    within = [row for row in rows if _loss(row) <= max_loss]
    row = min(within, key=lambda row: (row.state_bytes, _loss(row))) if within else min(rows, key=_loss)
    saved = f"{1 - row.state_bytes / record.uncut.state_bytes:.0%} less state for {_loss(row):+.3f} nats per token"
    stored = "" if row.state_dtype == "float32" else f", states stored in {row.state_dtype}"
    cut = "no cut" if row.method == UNCUT else f"{row.method} at key dim {row.key_dim}"
    if within:
        reason = f"{cut}{stored}: {saved}, the smallest state within {max_loss:g} nats of the uncut model"
    else:
        none = "no cut" if record.state_dtypes == ("float32",) else "nothing"
        smallest = f"the smallest loss is {cut}{stored}: {saved}"
        reason = f"{none} stays within {max_loss:g} nats of the uncut model; {smallest}"
    return Recommendation(
        row=record.rows.index(row), within=bool(within), max_loss=max_loss, reason=reason, command=command(row)
    )


def _loss(row: Row) -> float:
    """Return the nats per token over the uncut model; a row without them is never recommended."""
    return math.inf if row.nats_over_uncut is None else row.nats_over_uncut
