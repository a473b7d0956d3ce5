"""slimstate makes the recurrent state of trained linear-attention language models smaller.

The verbs of the command are functions here: `inspect`, `prune`, `reconstruct`, `recover`, `train`, `evaluate`,
`analyze`, `sweep`, `report`, `bench_mixer`, `bench_model`, `bench_decode`, `bench_calibrate`.
"""

import sys

from slimstate.system.interruption import STOP

if sys.argv and sys.argv[0].rpartition("/")[2] in ("-m", "slimstate"):
    STOP.listen()  # the command is starting: the imports below take seconds, in which it can be stopped too

from slimstate.api.benchmarking import bench_calibrate, bench_decode, bench_mixer, bench_model
from slimstate.api.cutting import apply_plan, estimate, inspect, make_plan, prune
from slimstate.api.measuring import analyze, evaluate, report, sweep
from slimstate.api.training import preview, reconstruct, recover, train
from slimstate.benchmark import BenchOptions, MixerShape
from slimstate.evaluation.analyze import AnalysisOptions
from slimstate.evaluation.evaluate import EvalOptions
from slimstate.evaluation.sweep import SweepOptions
from slimstate.evaluation.sweep_grid import SweepGrid
from slimstate.models.devices import RunOptions
from slimstate.models.offload import LoadOptions
from slimstate.models.prepare import prepare, prepare_fla
from slimstate.pruning.budget import Budget
from slimstate.pruning.options import Calibration, CutOptions
from slimstate.reconstruction.options import ReconstructOptions
from slimstate.selectors import Selector
from slimstate.system.errors import SlimstateError
from slimstate.system.progress import Reporter
from slimstate.system.version import __version__
from slimstate.training.options import PretrainOptions, RecoverOptions, TrainerOptions, TrainingText

__all__ = [
    "AnalysisOptions",
    "BenchOptions",
    "Budget",
    "Calibration",
    "CutOptions",
    "EvalOptions",
    "LoadOptions",
    "MixerShape",
    "PretrainOptions",
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
    "__version__",
    "analyze",
    "apply_plan",
    "bench_calibrate",
    "bench_decode",
    "bench_mixer",
    "bench_model",
    "estimate",
    "evaluate",
    "inspect",
    "make_plan",
    "prepare",
    "prepare_fla",
    "preview",
    "prune",
    "reconstruct",
    "recover",
    "report",
    "sweep",
    "train",
]
