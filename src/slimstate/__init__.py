"""slimstate makes the recurrent state of trained linear-attention language models smaller.

The verbs of the command are functions here: `inspect`, `prune`, `reconstruct`, `recover`, `train`, `evaluate`,
`analyze`, `sweep`, `verify`, `report`, `bench_mixer`, `bench_model`, `bench_decode`, `bench_calibrate`.

Each name is loaded when it is asked for first: most need torch, which takes seconds.
"""

import importlib
from typing import TYPE_CHECKING

# not later: the folder of that name would take its place here
from slimstate.api.reporting import report
from slimstate.system.version import __version__

if TYPE_CHECKING:
    from slimstate.api.measuring import analyze, evaluate, sweep
    from slimstate.api.training import preview, recover, train
    from slimstate.evaluation.analyze import AnalysisOptions
    from slimstate.evaluation.evaluate import EvalOptions
    from slimstate.evaluation.sweep import SweepOptions
    from slimstate.evaluation.sweep_grid import SweepGrid
    from slimstate.models.options import LoadOptions, RunOptions
    from slimstate.models.prepare import prepare, prepare_fla
    from slimstate.pruning.options import Budget, Calibration, CutOptions
    from slimstate.reconstruction.options import ReconstructOptions
    from slimstate.selectors import Selector
    from slimstate.system.errors import SlimstateError
    from slimstate.system.progress import Reporter
    from slimstate.training.options import PretrainOptions, RecoverOptions, TrainerOptions, TrainingText
    from slimstate.workflows.bench import (
        CalibrateBenchConfig,
        DecodeBenchConfig,
        MixerBenchConfig,
        ModelBenchConfig,
        bench_calibrate,
        bench_decode,
        bench_mixer,
        bench_model,
    )
    from slimstate.workflows.inspect import InspectConfig, inspect
    from slimstate.workflows.prune import PruneConfig, estimate, prune
    from slimstate.workflows.reconstruct import ReconstructConfig, reconstruct
    from slimstate.workflows.verify import VerifyConfig, verify

# the names above, by the module that each is loaded from
HOMES = {
    "api.measuring": ("analyze", "evaluate", "sweep"),
    "api.training": ("preview", "recover", "train"),
    "evaluation.analyze": ("AnalysisOptions",),
    "evaluation.evaluate": ("EvalOptions",),
    "evaluation.sweep": ("SweepOptions",),
    "evaluation.sweep_grid": ("SweepGrid",),
    "models.options": ("LoadOptions", "RunOptions"),
    "models.prepare": ("prepare", "prepare_fla"),
    "pruning.options": ("Budget", "Calibration", "CutOptions"),
    "reconstruction.options": ("ReconstructOptions",),
    "selectors": ("Selector",),
    "system.errors": ("SlimstateError",),
    "system.progress": ("Reporter",),
    "workflows.inspect": ("InspectConfig", "inspect"),
    "workflows.prune": ("PruneConfig", "estimate", "prune"),
    "workflows.reconstruct": ("ReconstructConfig", "reconstruct"),
    "workflows.verify": ("VerifyConfig", "verify"),
    "training.options": ("PretrainOptions", "RecoverOptions", "TrainerOptions", "TrainingText"),
    "workflows.bench": (
        "CalibrateBenchConfig", "DecodeBenchConfig", "MixerBenchConfig", "ModelBenchConfig",
        "bench_calibrate", "bench_decode", "bench_mixer", "bench_model",
    ),
}  # fmt: skip

__all__ = [
    "AnalysisOptions",
    "Budget",
    "CalibrateBenchConfig",
    "Calibration",
    "CutOptions",
    "DecodeBenchConfig",
    "EvalOptions",
    "InspectConfig",
    "LoadOptions",
    "MixerBenchConfig",
    "ModelBenchConfig",
    "PretrainOptions",
    "PruneConfig",
    "ReconstructConfig",
    "ReconstructOptions",
    "RecoverOptions",
    "Reporter",
    "RunOptions",
    "Selector",
    "SlimstateError",
    "SweepGrid",
    "SweepOptions",
    "TrainerOptions",
    "TrainingText",
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
            found: object = getattr(importlib.import_module(f"slimstate.{home}"), name)
            globals()[name] = found
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
