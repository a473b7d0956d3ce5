"""Measure a model: perplexity on a text, lm-eval's tasks, recall; alone or beside a baseline. One record per run."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimstate.checkpoints.reader import Checkpoint
from slimstate.data.text import Windows
from slimstate.evaluation.associative_recall import associative_recall
from slimstate.evaluation.compare import distinct_names, identity, same_tokenizers, shared_windows
from slimstate.evaluation.lm_eval import resolve, run_tasks, sources
from slimstate.evaluation.perplexity import bytes_per_token, mean_nats, perplexity_of
from slimstate.models.devices import pick_device, pick_dtype
from slimstate.models.load import load
from slimstate.records.base import command, versions
from slimstate.records.evaluation import measures
from slimstate.system.atomic import check_place
from slimstate.system.errors import PlanError
from slimstate.system.json_files import plain, write_json
from slimstate.system.progress import SILENT, Reporter


@dataclass(frozen=True, kw_only=True)
class Programme:
    """What to measure of a model."""

    windows: Windows | None
    tasks: tuple[str, ...]
    associative: bool
    task_data: Path | None
    limit: int | None
    seed: int


def evaluate(
    model: str | Path,
    text: str | Path | None = None,
    *,
    length: int = 1024,
    max_tokens: int | None = None,
    tasks: str | None = None,
    recall: bool = False,
    associative: bool = False,
    task_data: str | Path | None = None,
    limit: int | None = None,
    baseline: str | Path | None = None,
    seed: int = 0,
    device: str | None = None,
    dtype: str | None = None,
    out: str | Path | None = None,
    reporter: Reporter = SILENT,
) -> dict[str, Any]:
    """Perplexity per token of `text`, with nats and bits per byte; tasks; recall. Returns the record."""
    started = time.perf_counter()
    if associative and text is None:
        raise PlanError("--associative hides its names in a text: give --text too")
    if text is None and not tasks and not recall:
        raise PlanError("nothing to measure: give --text, --tasks or --recall")
    if limit is not None and limit < 1:
        raise PlanError(f"--limit {limit}: at least 1 document is needed")
    if out is not None:
        check_place(Path(out), folder=False)
    pick_dtype(dtype, pick_device(device))
    checkpoints = [Checkpoint.open(source) for source in (model, baseline) if source is not None]
    names = distinct_names([checkpoint.source for checkpoint in checkpoints])
    tokenizers = same_tokenizers(checkpoints)
    wanted = resolve(",".join(filter(None, (tasks, "recall" if recall else None)))) if tasks or recall else ()
    folder = None if task_data is None else Path(task_data)
    if wanted:
        sources(wanted, folder)  # what cannot be had is said before a model is loaded
    programme = Programme(
        windows=None if text is None else shared_windows(tokenizers, str(text), length, max_tokens),
        tasks=wanted,
        associative=associative,
        task_data=folder,
        limit=limit,
        seed=seed,
    )
    options = {
        "text": text, "length": length if text else None, "max_tokens": max_tokens, "tasks": tasks, "recall": recall,
        "associative": associative, "task_data": task_data, "limit": limit, "baseline": baseline, "seed": seed,
        "device": device, "dtype": dtype, "out": out,
    }  # fmt: skip
    results = [
        {**identity(checkpoint, name), **measure(checkpoint, programme, device, dtype, reporter)}
        for checkpoint, name in zip(checkpoints, names, strict=True)
    ]
    record: dict[str, Any] = {"kind": "evaluation", **results[0]}
    if baseline is not None:
        record |= {"baseline": results[1], "compared": compare(results[0], results[1])}
    record |= {
        "seed": seed,
        "versions": versions(),
        "command": command("eval", [model], options),
        "seconds": time.perf_counter() - started,
    }
    record = plain(record)
    if out is not None:
        write_json(Path(out), record)
    return record


def measure(
    checkpoint: Checkpoint, programme: Programme, device: str | None, dtype: str | None, reporter: Reporter
) -> dict[str, Any]:
    """All the measures of one model."""
    with reporter.waiting("loading the model"):
        runtime = load(checkpoint.folder, device=device, dtype=dtype)
    reporter.say(f"kernels: {runtime.kernels}")
    found: dict[str, Any] = {"kernels": runtime.kernels}
    if programme.windows is not None:
        tokens = programme.windows.tokens
        nats = mean_nats(runtime, tokens, reporter)
        per_token = bytes_per_token(runtime.tokenizer, tokens)
        found |= {
            "text": programme.windows.source,
            "digest": programme.windows.digest,
            "length": tokens.shape[1],
            "windows": len(tokens),
            "tokens": tokens.numel(),
            "perplexity": perplexity_of(nats),
            "nats_per_token": nats,
            "nats_per_byte": nats / per_token,
            "bits_per_byte": nats / per_token / math.log(2),
        }
        if programme.associative:
            found["associative_recall"] = associative_recall(
                runtime, programme.windows.source, seed=programme.seed, reporter=reporter
            )
    if programme.tasks:
        found["lm_eval"] = run_tasks(
            runtime,
            programme.tasks,
            data=programme.task_data,
            limit=programme.limit,
            seed=programme.seed,
            reporter=reporter,
        )
    return found


def scores_of(result: Mapping[str, Any]) -> dict[str, tuple[float, bool]]:
    """Every number of a result that can be compared, and whether more of it is better."""
    return {
        found.name: (found.value, found.more_is_better)
        for found in measures(result)
        if found.value is not None and found.more_is_better is not None
    }


def compare(result: Mapping[str, Any], baseline: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Both side by side. The share is what the model has of the baseline's score: 1 is all of it."""
    theirs = scores_of(baseline)
    rows = []
    for name, (value, more_is_better) in scores_of(result).items():
        reference = theirs[name][0]
        above, below = (value, reference) if more_is_better else (reference, value)
        share = above / below if below else None
        rows.append({"measure": name, "model": value, "baseline": reference, "share": share})
    return rows
