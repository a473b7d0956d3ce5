"""slimstate makes the recurrent state of trained linear-attention language models smaller.

The verbs of the command are functions here: `inspect`, `prune`, `reconstruct`, `recover`, `train`, `evaluate`,
`analyze`, `sweep`, `verify`, `report`, `bench_mixer`, `bench_model`, `bench_decode`, `bench_calibrate`.

Each name is loaded when it is asked for first: most need torch, which takes seconds.
"""

import ast
import importlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from slimstate.system.version import __version__

if TYPE_CHECKING:
    from slimstate.benchmark.options import CalibrateBenchConfig, DecodeBenchConfig, MixerBenchConfig, ModelBenchConfig
    from slimstate.models.options import LoadOptions, RunOptions
    from slimstate.models.prepare import prepare, prepare_fla
    from slimstate.pruning.options import Budget, Calibration, CutOptions
    from slimstate.reconstruction.options import ReconstructOptions
    from slimstate.selectors import Selector
    from slimstate.system.errors import SlimstateError
    from slimstate.system.progress import Reporter
    from slimstate.workflows.analyze import analyze
    from slimstate.workflows.bench import bench_calibrate, bench_decode, bench_mixer, bench_model
    from slimstate.workflows.evaluate import evaluate
    from slimstate.workflows.inspect import inspect
    from slimstate.workflows.options import (
        AnalyzeConfig,
        EvalConfig,
        InspectConfig,
        PruneConfig,
        ReconstructConfig,
        RecoverConfig,
        SweepConfig,
        TrainConfig,
        VerifyConfig,
    )
    from slimstate.workflows.prune import estimate, prune
    from slimstate.workflows.reconstruct import reconstruct
    from slimstate.workflows.recover import preview, recover
    from slimstate.workflows.report import report
    from slimstate.workflows.sweep import sweep
    from slimstate.workflows.train import train
    from slimstate.workflows.verify import verify

__all__ = [
    "AnalyzeConfig",
    "Budget",
    "CalibrateBenchConfig",
    "Calibration",
    "CutOptions",
    "DecodeBenchConfig",
    "EvalConfig",
    "InspectConfig",
    "LoadOptions",
    "MixerBenchConfig",
    "ModelBenchConfig",
    "PruneConfig",
    "ReconstructConfig",
    "ReconstructOptions",
    "RecoverConfig",
    "Reporter",
    "RunOptions",
    "Selector",
    "SlimstateError",
    "SweepConfig",
    "TrainConfig",
    "VerifyConfig",
    "__version__",
    "analyze",
    "bench_calibrate",
    "bench_decode",
    "bench_mixer",
    "bench_model",
    "estimate",
    "evaluate",
    "inspect",
    "prepare",
    "prepare_fla",
    "preview",
    "prune",
    "reconstruct",
    "recover",
    "report",
    "sweep",
    "train",
    "verify",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_homes()[name]), name)
    globals()[name] = value
    return value


@cache
def _homes() -> dict[str, str]:
    """Return the module of each name, from the imports above, which only type checkers execute."""
    nodes = ast.walk(ast.parse(Path(__file__).read_text(encoding="utf-8")))
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
