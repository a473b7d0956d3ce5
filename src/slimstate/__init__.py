"""slimstate makes the recurrent state of trained linear-attention language models smaller.

The verbs of the command are functions here: `inspect`, `prune`, `recover`, `train`, `evaluate`, `analyze`, `sweep`,
`report`, `bench_mixer`, `bench_model`, `bench_decode`, `bench_calibrate`.
"""

from slimstate.benchmark import bench_calibrate, bench_decode, bench_mixer, bench_model
from slimstate.evaluation.analyze import AnalysisOptions, analyze
from slimstate.evaluation.evaluate import EvalOptions, evaluate
from slimstate.evaluation.sweep import SweepOptions, sweep
from slimstate.evaluation.sweep_grid import SweepGrid
from slimstate.models.devices import RunOptions
from slimstate.models.prepare import prepare, prepare_fla
from slimstate.pruning.inspect import inspect
from slimstate.pruning.planning import Calibration
from slimstate.pruning.prune import prune
from slimstate.report import write_report as report
from slimstate.system.errors import SlimstateError
from slimstate.system.progress import Reporter
from slimstate.training.pretrain import train
from slimstate.training.recover import recover

__version__ = "0.1.0"
__all__ = [
    "AnalysisOptions",
    "Calibration",
    "EvalOptions",
    "Reporter",
    "RunOptions",
    "SlimstateError",
    "SweepGrid",
    "SweepOptions",
    "__version__",
    "analyze",
    "bench_calibrate",
    "bench_decode",
    "bench_mixer",
    "bench_model",
    "evaluate",
    "inspect",
    "prepare",
    "prepare_fla",
    "prune",
    "recover",
    "report",
    "sweep",
    "train",
]
