"""Many methods and key dims from one calibration, scored by masking: what each cut would cost, before any is made.

The folder holds the evidence and `sweep.json`, which grows by a row as soon as it is measured: a sweep that was
stopped goes on where it was.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimstate.checkpoints.reader import Checkpoint
from slimstate.core.plan import Plan
from slimstate.data.text import Windows, sample_windows
from slimstate.evaluation.perplexity import evaluation_windows, mean_nats, perplexity_of
from slimstate.evaluation.state_traces import FinalUtilisation
from slimstate.evaluation.sweep_results import EVIDENCE, SWEEP, earlier_sweep, recommend
from slimstate.families import loader_of
from slimstate.models.devices import pick_device, pick_dtype
from slimstate.models.hooks import masked, observed
from slimstate.models.load import Runtime, load, load_tokenizer
from slimstate.pruning.budget import state_bytes
from slimstate.pruning.planning import Calibration, check_rotatable, gather_evidence, make_plan, resolve_key_dim
from slimstate.records.base import command, versions
from slimstate.records.sweep import UNINFORMED, SweepRecord
from slimstate.report.tables import write_tables
from slimstate.selectors import SELECTORS, Need, Request, selector_named
from slimstate.system import distributed
from slimstate.system.atomic import check_place
from slimstate.system.errors import PlanError
from slimstate.system.json_files import plain, write_json
from slimstate.system.progress import SILENT, Reporter

COMPRESSIONS = (0.3, 0.4, 0.5, 0.75)
MAX_LOSS = 0.1  # nats per token that a recommended cut may cost
STATES_OF = 2  # windows whose last states tell the utilisation
COLUMNS = ("method", "score", "compression", "key dim", "perplexity", "nats over uncut", "utilisation", "kappa")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A cut to be judged."""

    method: str
    score: str
    compression: float
    key_dim: int

    @property
    def key(self) -> tuple[str, str, int]:
        return self.method, self.score, self.key_dim

    def request(self, seed: int, f: float) -> Request:
        return Request(keep=self.key_dim, score=self.score, seed=seed, f=f)


def sweep(
    model: str | Path,
    out: str | Path,
    *,
    text: str | Path,
    data: str | None = None,
    methods: Sequence[str] = tuple(SELECTORS),
    compressions: Sequence[float] = COMPRESSIONS,
    scores: Sequence[str] = ("kq",),
    samples: int = 128,
    length: int = 2048,
    text_length: int = 1024,
    max_tokens: int | None = None,
    max_loss: float = MAX_LOSS,
    seed: int = 0,
    f: float = 1.5,
    device: str | None = None,
    dtype: str | None = None,
    reporter: Reporter = SILENT,
) -> dict[str, Any]:
    """Judge every method at every compression; records, tables and a figure go to `out`. Returns the record.

    Several processes share the calibration; the main one judges and writes, and the others wait for its record.
    """
    from slimstate.report.plots import pareto, save  # matplotlib is an extra

    started, folder = time.perf_counter(), Path(out)
    checkpoint = Checkpoint.open(model)
    width = checkpoint.mixers[0].axis.width
    if not 0 <= max_loss < math.inf:
        raise PlanError(f"--max-loss {max_loss}: it must be a number of nats, 0 or more")
    check_place(folder, folder=True)
    for method in methods:
        check_rotatable(checkpoint, method)
    resolved = [resolve_key_dim(width, compression, None) for compression in compressions]
    key_dims: dict[int, float] = {}
    for (key_dim, _), compression in zip(resolved, compressions, strict=True):
        key_dims.setdefault(key_dim, compression)  # two compressions may round to one
    candidates = list(_candidates(key_dims, methods, scores, f))
    needs = _needs(methods, data)
    for _, line in resolved:
        reporter.say(line)
    calibration = Calibration(
        data=data, samples=samples, length=length, seed=seed, device=device, dtype=dtype, path=folder / EVIDENCE
    )
    tokenizer = load_tokenizer(checkpoint.folder)
    windows = evaluation_windows(tokenizer, str(text), text_length, max_tokens, "--text-length")
    drawn = _calibration_windows(tokenizer, calibration, needs)
    with reporter.waiting("reading the weights for their fingerprint"):
        fingerprint = checkpoint.fingerprint
    where = pick_device(device)
    settings = {
        "fingerprint": fingerprint,
        "calibration": None if drawn is None else drawn.describe(),
        "text": windows.describe(),
        "f": f,
        "seed": seed,
        "device": where.type,
        "dtype": str(pick_dtype(dtype, where)).removeprefix("torch."),
    }
    record: dict[str, Any] = {
        "kind": "sweep",
        "model": checkpoint.source,
        "model_type": checkpoint.family.model_type,
        "loader": loader_of(checkpoint.family.model_type).to_json(),
        "width": width,
        "value_dim": checkpoint.mixers[0].value_dim,
        "settings": settings,
        "versions": versions(),
        **earlier_sweep(folder / SWEEP, settings),
    }
    missing = _still_to_do(record["rows"], candidates)
    if record["rows"]:
        reporter.say(f"{len(candidates) - len(missing)} of {len(candidates)} rows are in {folder / SWEEP} already")
    if missing:
        with reporter.waiting("loading the model"):
            runtime = load(checkpoint.folder, device=device, dtype=dtype)
        reporter.say(f"kernels: {runtime.kernels}")
        record["kernels"] = runtime.kernels
        judge = _Judge(checkpoint, runtime, windows, reporter)
        gathered, _ = gather_evidence(checkpoint, needs, calibration, drawn, reporter, runtime)

        def judged() -> dict[str, Any]:
            with reporter.table(COLUMNS) as table:
                record["uncut"] = record["uncut"] or judge.uncut()
                for row in record["rows"]:
                    table(_cells(row))
                for candidate in missing:
                    plan = make_plan(checkpoint, candidate.method, candidate.request(seed, f), gathered)
                    record["rows"].append(judge.row(candidate, plan, record["uncut"]["nats_per_token"]))
                    write_json(folder / SWEEP, record)
                    table(_cells(record["rows"][-1]))
            return record

        record = distributed.from_main(judged)
    _put_in_order(record["rows"], candidates)
    calibrated = {"data": data, "samples": samples, "length": length} if drawn else {}
    rest = {
        "text": text, "text_length": text_length, "max_tokens": max_tokens, "max_loss": max_loss, "seed": seed,
        "rrqr_f": f, "device": device, "dtype": dtype, "out": out,
    }  # fmt: skip
    record |= {
        "recommended": recommend(record, max_loss, folder, str(model)),
        "command": command("sweep", [model], {**_swept(record["rows"]), **calibrated, **rest}),
        "seconds": time.perf_counter() - started,
    }

    def write() -> None:
        write_json(folder / SWEEP, record)
        typed = SweepRecord.from_json(plain(record))
        write_tables(typed, folder)
        save(pareto(typed), folder / "pareto")

    distributed.from_main(write)
    return record


def _key(row: Mapping[str, Any]) -> tuple[str, str, int]:
    return row["method"], row["score"], row["key_dim"]


def _still_to_do(rows: Sequence[dict[str, Any]], candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates without a row. Where two compressions round to one key dim, rows go by the one asked for now."""
    asked = {candidate.key_dim: candidate.compression for candidate in candidates}
    for row in rows:
        row["compression"] = asked.get(row["key_dim"], row["compression"])
    done = {_key(row) for row in rows}
    return [candidate for candidate in candidates if candidate.key not in done]


def _put_in_order(rows: list[dict[str, Any]], candidates: Sequence[Candidate]) -> None:
    """As they were asked for; rows of an earlier sweep come last."""
    wanted = {candidate.key: number for number, candidate in enumerate(candidates)}
    rows.sort(key=lambda row: wanted.get(_key(row), len(wanted)))


def _swept(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """What makes all these rows, as options of the command."""
    return {f"{name}s": list(dict.fromkeys(row[name] for row in rows)) for name in ("method", "compression", "score")}


def _candidates(
    key_dims: Mapping[int, float], methods: Sequence[str], scores: Sequence[str], f: float
) -> Iterator[Candidate]:
    """Every method at every key dim, with the compression that asked for it first, and by every score."""
    if not (methods and key_dims and scores):
        raise PlanError("a sweep needs at least one method, one compression and one score")
    for score in scores:
        Request(keep=1, score=score, f=f)
    for method in dict.fromkeys(methods):
        selector_named(method)
        for score in dict.fromkeys(scores) if method not in UNINFORMED else ("kq",):
            for key_dim, compression in key_dims.items():
                yield Candidate(method=method, score=score, compression=compression, key_dim=key_dim)


def _needs(methods: Sequence[str], data: str | None) -> frozenset[Need]:
    """What one calibration must collect for all methods; the Gram matrices always, for the condition of the keys."""
    needs = frozenset(need for method in methods for need in selector_named(method).needs) - {"weight"}
    if needs and data is None:
        calibrated = [method for method in methods if selector_named(method).calibrated]
        raise PlanError(f"{', '.join(calibrated)} look at activations: give text to calibrate on with --data")
    return frozenset(needs | {"gram"}) if data is not None else frozenset()


def _calibration_windows(tokenizer: Any, calibration: Calibration, needs: frozenset[Need]) -> Windows | None:
    if not needs or calibration.data is None:
        return None
    return sample_windows(
        tokenizer, calibration.data, samples=calibration.samples, length=calibration.length, seed=calibration.seed
    )


class _Judge:
    """Measures a model as it is and under masks, always on the same windows."""

    def __init__(self, checkpoint: Checkpoint, runtime: Runtime, windows: Windows, reporter: Reporter) -> None:
        self.checkpoint, self.runtime, self.windows, self.reporter = checkpoint, runtime, windows, reporter

    def _measure(self, key_dim: int, label: str) -> dict[str, Any]:
        mixers = self.checkpoint.mixers
        states = FinalUtilisation(key_dim, STATES_OF)
        with observed(self.runtime.model, mixers, states.see):
            nats = mean_nats(self.runtime, self.windows.tokens, self.reporter, label)
        return {
            "key_dim": key_dim,
            "state_bytes": state_bytes(mixers, key_dim)["fp32"],
            "perplexity": perplexity_of(nats),
            "nats_per_token": nats,
            "rank_utilisation": states.mean,
        }

    def uncut(self) -> dict[str, Any]:
        return self._measure(self.checkpoint.mixers[0].axis.width, "uncut")

    def row(self, candidate: Candidate, plan: Plan, uncut_nats: float) -> dict[str, Any]:
        label = f"{candidate.method} {candidate.score} {candidate.key_dim}"
        rescaled = not self.checkpoint.family.correction(self.checkpoint.config).possible
        with masked(self.runtime.model, self.checkpoint.mixers, plan.selections, rescaled=rescaled):
            found = self._measure(candidate.key_dim, label)
        kappas = [
            kappa
            for selection in plan.selections.values()
            for kappa in selection.certificate.get("condition_after", ())
        ]
        row = {
            "method": candidate.method,
            "score": candidate.score,
            "compression": candidate.compression,
            **found,
            "nats_over_uncut": found["nats_per_token"] - uncut_nats,
            "kappa": _median(kappas),
            "kappa_worst": max(_infinite(kappas), default=None),
        }
        return dict(plain(row))


def _median(kappas: Sequence[float | None]) -> float | None:
    """The median over heads, of which those with singular keys count as infinite."""
    return statistics.median_high(_infinite(kappas)) if kappas else None


def _infinite(kappas: Sequence[float | None]) -> list[float]:
    return [math.inf if kappa is None else kappa for kappa in kappas]


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    kappa = "" if row["kappa"] is None else f"{row['kappa']:,.0f}"
    numbers = (f"{row['perplexity']:.2f}", f"{row['nats_over_uncut']:+.3f}", f"{row['rank_utilisation']:.3f}", kappa)
    return row["method"], row["score"], f"{row['compression']:g}", str(row["key_dim"]), *numbers
