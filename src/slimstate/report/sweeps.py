"""The section on sweeps: what a smaller state costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slimstate.records.evaluation import Row, SweepRecord, Uncut
from slimstate.records.folder import RecordFile
from slimstate.records.numbers import fixed, mebibytes, percent, perplexity, signed
from slimstate.report import plots, tables
from slimstate.report.drawing import drawing, figure_id

COLUMNS = (
    "method", "score", "compression", "key dim", "state, MiB", "perplexity per token", "per word",
    "bits per byte", "nats over uncut", "utilisation", "κ, median", "κ, worst",
)  # fmt: skip


def sweep_section(sweeps: Sequence[RecordFile[SweepRecord]]) -> dict[str, Any]:
    """Return what the template shows of every sweep."""
    return {"sweeps": [{"path": file.path, **_values(file.record, number)} for number, file in enumerate(sweeps)]}


def _values(sweep: SweepRecord, number: int) -> dict[str, Any]:
    name, unit = figure_id("pareto", number), tables.perplexity_metric(sweep).long_title.capitalize()
    tasks, mixed_types = list(tables.task_values(sweep.uncut)), sweep.state_dtypes != ("float32",)
    best, front = sweep.recommended, sweep.front if mixed_types else ()
    badge = "recommended" if best is not None and best.within else "smallest loss"
    grids = [("In the layout of the paper.", tables.main_grid(sweep))]
    if tables.has_ablation(sweep):
        grids.append(("Perplexity by score.", tables.ablation_grid(sweep)))
    return {
        "record": sweep,
        "unit": unit,
        "drawing": drawing(plots.pareto(sweep), name, f"{unit} against state size", point_tips(sweep)),
        "mixed_types": mixed_types,
        "columns": (*COLUMNS, *["state type"] * mixed_types, *(task.replace("_", " ") for task in tasks)),
        "rows": [
            {
                "row": row,
                "point": f"{name}-point-{place}",
                "is_best": best is not None and place == best.row,
                "badges": [badge] * (best is not None and place == best.row) + ["front"] * (place in front),
                "tasks": [tables.task_values(row).get(task) for task in tasks],
            }
            for place, row in enumerate(sweep.rows)
        ],
        "uncut": perplexities(sweep.uncut),
        "uncut_tasks": {task.replace("_", " "): value for task, value in tables.task_values(sweep.uncut).items()},
        "grids": grids,
    }


def saved_share(sweep: SweepRecord, row: Row) -> float:
    """Return the share of the uncut model's state that a row saves."""
    return 1 - row.state_bytes / sweep.uncut.state_bytes


def point_tips(sweep: SweepRecord) -> dict[str, str]:
    """Return what to show at each point of the figure, by the id of the point."""
    tips = {}
    for place, row in enumerate(sweep.rows):
        stored = "" if row.state_dtype == "float32" else f", state in {row.state_dtype}"
        tips[f"point-{place}"] = (
            f"{row.method} ({row.score}), key dim {row.key_dim}{stored}\n{perplexities(row)}\n"
            f"{signed(row.nats_over_uncut)} nats per token over uncut\n"
            f"state {mebibytes(row.state_bytes)} MiB, {percent(saved_share(sweep, row))} less"
        )
    size = f"state {mebibytes(sweep.uncut.state_bytes)} MiB"
    tips["point-uncut"] = f"uncut, key dim {sweep.uncut.key_dim}\n{perplexities(sweep.uncut)}\n{size}"
    return tips


def perplexities(result: Row | Uncut) -> str:
    """Return a perplexity in all units that are known."""
    per_word = "" if result.word_perplexity is None else f", {perplexity(result.word_perplexity)} per word"
    per_byte = "" if result.bits_per_byte is None else f", {fixed(result.bits_per_byte, 3)} bits per byte"
    return f"perplexity {perplexity(result.perplexity)} per token{per_word}{per_byte}"
