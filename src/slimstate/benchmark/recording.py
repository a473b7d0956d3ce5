"""From timings to one record: ratios to the widest key dim, what it ran on, and the command that runs it again."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slimstate.benchmark.timing import Timing, device_name
from slimstate.families.contract import Library
from slimstate.models.devices import pick_device, pick_dtype
from slimstate.models.prepare import describe_kernels, prepare_fla
from slimstate.records.base import command, versions
from slimstate.system.atomic import check_place, write_text
from slimstate.system.errors import PlanError
from slimstate.system.json_files import write_json
from slimstate.system.progress import Reporter

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """One benchmark under way: where it runs, and what it was asked for."""

    verb: str
    device: torch.device
    dtype: torch.dtype
    rounds: int
    out: Path | None
    reporter: Reporter
    started: float
    kernels: str

    @classmethod
    def begin(
        cls,
        verb: str,
        *,
        device: str | None,
        dtype: str | None,
        rounds: int,
        out: str | Path | None,
        reporter: Reporter,
        library: Library = "fla",
    ) -> Bench:
        if rounds < 1:
            raise PlanError(f"{rounds} rounds: at least one is needed")
        where = pick_device(device)
        folder = None if out is None else Path(out)
        if folder is not None:
            import slimstate.report.plots  # noqa: F401  refuses now, not after the work, where matplotlib is missing

            check_place(folder, folder=True)
        prepare_fla()
        precision = pick_dtype(dtype, where)
        kernels = describe_kernels(where, precision, library)
        reporter.say(f"{device_name(where)}; kernels: {kernels}")
        return cls(
            verb=verb, device=where, dtype=precision, rounds=rounds, out=folder, reporter=reporter,
            started=time.perf_counter(), kernels=kernels,
        )  # fmt: skip

    def attempt(self, row: Row, measure: Callable[..., tuple[Timing, Row]], *given: Any) -> Row:
        """The row with what was measured, or with why nothing was: a GPU that is full is an answer too."""
        try:
            timing, more = measure(self, *given)
            row = {**row, **timing.describe(), **more, "error": None}
        except torch.cuda.OutOfMemoryError:
            row = {**row, "error": "out of memory"}
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        what = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in row.items() if name in NAMES)
        told = row["error"] or f"{1000 * row['seconds']:.2f} ms"
        self.reporter.say(f"{what}: {told}")
        return row

    def finish(self, rows: Sequence[Row], settings: Mapping[str, Any], **facts: Any) -> dict[str, Any]:
        """The record, written with its tables and its figure where a folder was given."""
        record = {
            "kind": "bench",
            "bench": self.verb,
            "device": device_name(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "kernels": self.kernels,
            "settings": dict(settings),
            "rounds": self.rounds,
            "rows": list(rows),
            **facts,
            "command": command(
                "bench",
                [self.verb],
                {**settings, "rounds": self.rounds, "device": self.device.type, "out": self.out},
            ),
            "versions": versions(),
            "seconds": time.perf_counter() - self.started,
        }
        if self.out is not None:
            self._write(record, self.out)
        return record

    def _write(self, record: dict[str, Any], out: Path) -> None:
        from slimstate.benchmark.figures import figure_of
        from slimstate.benchmark.tables import as_latex, as_markdown
        from slimstate.report.plots import save

        write_json(out / f"bench-{self.verb}.json", record)
        write_text(out / f"bench-{self.verb}.md", as_markdown(record))
        write_text(out / f"bench-{self.verb}.tex", as_latex(record))
        save(figure_of(record), out / f"bench-{self.verb}")


NAMES = ("model", "key_dim", "mode", "batch", "method")


def with_ratios(rows: Sequence[Row], group: Sequence[str]) -> list[Row]:
    """Each row with its speed and memory relative to the widest key dim of its group that was measured."""
    done = []
    for row in rows:
        peers = [other for other in rows if all(other[name] == row[name] for name in group) and not other["error"]]
        if row["error"] or not peers:
            done.append({**row, "speedup": None, "memory_ratio": None})
            continue
        widest = max(peers, key=lambda peer: peer["key_dim"])
        memory = row["peak_bytes"] / widest["peak_bytes"] if row["peak_bytes"] else None
        alike = "seconds" if widest.get("graph") == row.get("graph") else "eager_seconds"  # one had no room for a graph
        done.append({**row, "speedup": widest[alike] / row[alike], "memory_ratio": memory})
    return done


def positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise PlanError(f"{name.replace('_', ' ')} {size}: it must be at least 1")


def checked_modes(modes: Sequence[str], known: Sequence[str]) -> list[str]:
    for mode in modes:
        if mode not in known:
            raise PlanError(f"unknown mode {mode!r}; there are {', '.join(known)}")
    return list(modes)
