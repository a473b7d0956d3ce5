"""slimstate makes the recurrent state of trained linear-attention language models smaller.

The verbs of the command are functions here: `inspect`, `prune`, `reconstruct`, `recover`, `train`, `evaluate`,
`analyze`, `sweep`, `verify`, `report`, `bench_mixer`, `bench_model`, `bench_decode`, `bench_calibrate`.

Each name is loaded when it is asked for first: most need torch, which takes seconds.
"""

import importlib
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
    from slimstate.workflows.analyze import AnalyzeConfig, analyze
    from slimstate.workflows.bench import bench_calibrate, bench_decode, bench_mixer, bench_model
    from slimstate.workflows.evaluate import EvalConfig, evaluate
    from slimstate.workflows.inspect import InspectConfig, inspect
    from slimstate.workflows.prune import PruneConfig, estimate, prune
    from slimstate.workflows.reconstruct import ReconstructConfig, reconstruct
    from slimstate.workflows.recover import RecoverConfig, preview, recover
    from slimstate.workflows.report import report
    from slimstate.workflows.sweep import SweepConfig, sweep
    from slimstate.workflows.train import TrainConfig, train
    from slimstate.workflows.verify import VerifyConfig, verify

# the names above, by the module that each is loaded from
HOMES = {
    "benchmark.options": ("CalibrateBenchConfig", "DecodeBenchConfig", "MixerBenchConfig", "ModelBenchConfig"),
    "models.options": ("LoadOptions", "RunOptions"),
    "models.prepare": ("prepare", "prepare_fla"),
    "pruning.options": ("Budget", "Calibration", "CutOptions"),
    "reconstruction.options": ("ReconstructOptions",),
    "selectors": ("Selector",),
    "system.errors": ("SlimstateError",),
    "system.progress": ("Reporter",),
    "workflows.analyze": ("AnalyzeConfig", "analyze"),
    "workflows.evaluate": ("EvalConfig", "evaluate"),
    "workflows.inspect": ("InspectConfig", "inspect"),
    "workflows.prune": ("PruneConfig", "estimate", "prune"),
    "workflows.reconstruct": ("ReconstructConfig", "reconstruct"),
    "workflows.recover": ("RecoverConfig", "preview", "recover"),
    "workflows.report": ("report",),
    "workflows.sweep": ("SweepConfig", "sweep"),
    "workflows.train": ("TrainConfig", "train"),
    "workflows.verify": ("VerifyConfig", "verify"),
    "workflows.bench": ("bench_calibrate", "bench_decode", "bench_mixer", "bench_model"),
}  # fmt: skip

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
    for home, names in HOMES.items():
        if name in names:
            value: object = getattr(importlib.import_module(f"slimstate.{home}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
