"""The sections on reconstruction and recovery."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from slimstate.records.folder import RecordFile
from slimstate.records.training import ReconstructionRecord, RecoveryRecord, TrainSettings
from slimstate.report.drawing import drawing
from slimstate.report.plots.results import layer_errors, loss_curves


def reconstruction_section(files: Sequence[RecordFile[ReconstructionRecord]]) -> dict[str, Any]:
    """Return the errors of every reconstruction, means over layers, and a figure of each layer."""
    records = [file.record for file in files if file.record.layers]
    rows = [
        {
            "record": record,
            "tokens": record.settings.samples * record.settings.length,
            "improved": sum(layer.step > 0 for layer in record.layers),
            "before": fmean(layer.before for layer in record.layers),
            "after": fmean(layer.after for layer in record.layers),
            "removed": 1 - record.error_after / record.error_before if record.error_before else 0.0,
        }
        for record in records
    ]
    label = "Error of every layer before and after"
    return {"rows": rows, "drawing": drawing(layer_errors(records), "reconstruction", label) if records else None}


def recovery_section(files: Sequence[RecordFile[RecoveryRecord]]) -> dict[str, Any]:
    """Return the outcome of every recovery, and a figure of the losses that were logged."""
    records = [file.record for file in files]
    logged = [record for record in records if record.log]
    return {
        "rows": [{"record": record, "parts": trained_parts(record.settings)} for record in records],
        "tokens": min(record.measured.tokens for record in records),
        "drawing": drawing(loss_curves(logged), "recovery", "Training loss against tokens") if logged else None,
    }


def trained_parts(settings: TrainSettings) -> str:
    """Return which weights a recovery trained."""
    if settings.adaptation.full:
        return "all weights"
    if settings.adaptation.mixers:
        return "mixers"
    return ", ".join(("adapters", "convolutions", *(settings.unfreeze.split(",") if settings.unfreeze else ())))
