"""Many methods and key dims from one calibration, scored by masking: what each cut would cost, before any is made.

The folder holds the evidence and `sweep.json`, which grows by a row as soon as it is measured: a sweep that was
stopped goes on where it was.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimstate.axes import Plan
from slimstate.checkpoint import Checkpoint, read_json
from slimstate.data import Windows, sample_windows
from slimstate.errors import DataError, PlanError
from slimstate.evidence import EvidenceFile
from slimstate.overview import state_bytes
from slimstate.perplexity import evaluation_windows, mean_nats, perplexity_of
from slimstate.planning import Calibration, gather_evidence, make_plan, resolve_key_dim
from slimstate.record import check_place, command, plain, versions, write_record
from slimstate.reporter import SILENT, Reporter
from slimstate.runtime import Runtime, load, load_tokenizer, pick_device, pick_dtype
from slimstate.selectors import SELECTORS, Need, Request, selector_named
from slimstate.tables import write_tables
from slimstate.taps import masked, observed
from slimstate.traces import FinalUtilisation

SWEEP, EVIDENCE = "sweep.json", "evidence.safetensors"
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
    """Judge every method at every compression; records, tables and a figure go to `out`. Returns the record."""
    from slimstate.plots import pareto, save  # matplotlib is an extra

    started, folder = time.perf_counter(), Path(out)
    checkpoint = Checkpoint.open(model)
    width = checkpoint.mixers[0].axis.width
    if not 0 <= max_loss < math.inf:
        raise PlanError(f"--max-loss {max_loss}: it must be a number of nats, 0 or more")
    check_place(folder, folder=True)
    candidates = list(_candidates(width, methods, compressions, scores, f, reporter))
    calibration = Calibration(
        data=data, samples=samples, length=length, seed=seed, device=device, dtype=dtype, path=folder / EVIDENCE
    )
    needs = _needs(methods, data)
    tokenizer = load_tokenizer(checkpoint.folder)
    windows = evaluation_windows(tokenizer, str(text), text_length, max_tokens, "--text-length")
    drawn = _calibration_windows(tokenizer, calibration, needs)
    with reporter.waiting("reading the weights for their fingerprint"):
        fingerprint = checkpoint.fingerprint
    settings = {
        "fingerprint": fingerprint,
        "calibration": None if drawn is None else drawn.describe(),
        "text": windows.describe(),
        "f": f,
        "seed": seed,
        "device": str(where := pick_device(device)),
        "dtype": str(pick_dtype(dtype, where)).removeprefix("torch."),
    }
    record: dict[str, Any] = {
        "kind": "sweep",
        "model": checkpoint.source,
        "model_type": checkpoint.family.model_type,
        "width": width,
        "value_dim": checkpoint.mixers[0].value_dim,
        "settings": settings,
        "versions": versions(),
    }
    earlier = _earlier(folder / SWEEP, settings)
    record |= {"kernels": earlier.get("kernels"), "uncut": earlier.get("uncut"), "rows": earlier.get("rows", [])}
    asked = {candidate.key_dim: candidate.compression for candidate in candidates}
    for row in record["rows"]:  # two compressions may round to one key dim: it goes by the one asked for last
        row["compression"] = asked.get(row["key_dim"], row["compression"])
    done = {(row["method"], row["score"], row["key_dim"]): row for row in record["rows"]}
    missing = [candidate for candidate in candidates if candidate.key not in done]
    if done:
        reporter.say(f"{len(candidates) - len(missing)} of {len(candidates)} rows are in {folder / SWEEP} already")
    if missing:
        with reporter.waiting("loading the model"):
            runtime = load(checkpoint.folder, device=device, dtype=dtype)
        reporter.say(f"kernels: {runtime.kernels}")
        record["kernels"] = runtime.kernels
        with reporter.table(COLUMNS) as table:
            judge = _Judge(checkpoint, runtime, windows, reporter)
            if record["uncut"] is None:
                record["uncut"] = judge.uncut()
            gathered, _ = gather_evidence(checkpoint, needs, calibration, drawn, reporter, runtime)
            for row in record["rows"]:
                table(_cells(row))
            for candidate in missing:
                plan = _plan(checkpoint, candidate, gathered, seed, f)
                record["rows"].append(judge.row(candidate, plan, record["uncut"]["nats_per_token"]))
                write_record(folder / SWEEP, record)
                table(_cells(record["rows"][-1]))
    wanted = {candidate.key: number for number, candidate in enumerate(candidates)}
    record["rows"].sort(key=lambda row: wanted.get((row["method"], row["score"], row["key_dim"]), len(wanted)))
    record["recommended"] = recommend(record, max_loss, folder, str(model))
    swept = {
        f"{name}s": list(dict.fromkeys(row[name] for row in record["rows"]))
        for name in ("method", "compression", "score")
    }
    calibrated = {"data": data, "samples": samples, "length": length} if drawn else {}
    rest = {
        "text": text, "text_length": text_length, "max_tokens": max_tokens, "max_loss": max_loss, "seed": seed,
        "rrqr_f": f, "device": device, "dtype": dtype, "out": out,
    }  # fmt: skip
    record["command"] = command("sweep", [model], {**swept, **calibrated, **rest})
    record["seconds"] = time.perf_counter() - started
    write_record(folder / SWEEP, record)
    write_tables(record, folder)
    save(pareto(record), folder / "pareto")
    return record


def _candidates(
    width: int,
    methods: Sequence[str],
    compressions: Sequence[float],
    scores: Sequence[str],
    f: float,
    reporter: Reporter,
) -> Iterator[Candidate]:
    """Each once, though two compressions may round to the same key dim."""
    if not (methods and compressions and scores):
        raise PlanError("a sweep needs at least one method, one compression and one score")
    key_dims: dict[int, float] = {}
    for compression in compressions:
        key_dim, line = resolve_key_dim(width, compression, None)
        reporter.say(line)
        key_dims.setdefault(key_dim, compression)
    for score in scores:
        Request(keep=1, score=score, f=f)
    for method in dict.fromkeys(methods):
        selector_named(method)
        for score in dict.fromkeys(scores) if method != "random" else ("kq",):
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


def _earlier(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """What an interrupted sweep with the same settings has measured already."""
    if not path.exists():
        return {}
    found = read_json(path)
    if not _can_go_on(found):
        raise DataError(f"{path} is not a sweep that can go on: choose another --out or remove it")
    theirs = found["settings"]
    different = [
        "model" if name == "fingerprint" else name
        for name, value in settings.items()
        if _essence(theirs.get(name)) != _essence(value)
    ]
    if different:
        raise DataError(f"{path} is a sweep with another {', '.join(different)}: choose another --out or remove it")
    return found


def _essence(setting: Any) -> Any:
    """What of a setting decides a result: of a text its tokens, not where it lies."""
    return setting["digest"] if isinstance(setting, dict) and "digest" in setting else setting


def _can_go_on(found: dict[str, Any]) -> bool:
    """Whether rows and the uncut model are of the kind that this module writes."""
    uncut, rows = found.get("uncut"), found.get("rows")
    if not (isinstance(found.get("settings"), dict) and isinstance(uncut, dict) and isinstance(rows, list)):
        return False
    measured = [uncut, *rows]
    numbers = ("key_dim", "state_bytes", "perplexity", "nats_per_token", "rank_utilisation")
    return all(
        isinstance(entry, dict) and all(isinstance(entry.get(name), (int, float)) for name in numbers)
        for entry in measured
    ) and all(
        isinstance(row.get("method"), str)
        and isinstance(row.get("score"), str)
        and isinstance(row.get("compression"), (int, float))
        and isinstance(row.get("nats_over_uncut"), (int, float))
        and all(isinstance(row.get(name, 0.0), (int, float, type(None))) for name in ("kappa", "kappa_worst"))
        for row in rows
    )


def _plan(checkpoint: Checkpoint, candidate: Candidate, gathered: EvidenceFile | None, seed: int, f: float) -> Plan:
    request = Request(keep=candidate.key_dim, score=candidate.score, seed=seed, f=f)
    return make_plan(checkpoint, candidate.method, request, gathered)


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
        with masked(self.runtime.model, self.checkpoint.mixers, plan.selections):
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


def recommend(record: dict[str, Any], max_loss: float, folder: Path, model: str) -> dict[str, Any]:
    """The smallest state whose loss is within `max_loss`; where none is, the mildest loss, said to be none."""
    rows = record["rows"]
    within = [row for row in rows if row["nats_over_uncut"] <= max_loss]
    chosen = (
        min(within, key=lambda row: (row["state_bytes"], row["nats_over_uncut"]))
        if within
        else min(rows, key=lambda row: row["nats_over_uncut"])
    )
    share = 1 - chosen["state_bytes"] / record["uncut"]["state_bytes"]
    what = f"{chosen['method']} at key dim {chosen['key_dim']}: {share:.0%} less state for {chosen['nats_over_uncut']:+.3f} nats per token"  # noqa: E501
    if within:
        reason = f"{what}, the smallest state within {max_loss:g} nats of the uncut model"
    else:
        reason = f"no cut stays within {max_loss:g} nats of the uncut model; the mildest is {what}"
    options = {
        "out": "SLIM",
        "method": chosen["method"],
        "key_dim": chosen["key_dim"],
        "score": chosen["score"],
        "seed": record["settings"]["seed"],
        "rrqr_f": record["settings"]["f"],
        "evidence": folder / EVIDENCE if record["settings"]["calibration"] else None,
    }
    return {
        "row": rows.index(chosen),
        "within": bool(within),
        "max_loss": max_loss,
        "reason": reason,
        "command": command("prune", [model], options),
    }
