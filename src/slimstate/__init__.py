"""slimstate makes the recurrent state of trained linear-attention language models smaller.

The verbs of the command are functions here: `inspect`, `prune`, `reconstruct`, `recover`, `train`, `evaluate`,
`analyze`, `sweep`, `verify`, `report`, `bench_mixer`, `bench_model`, `bench_decode`, `bench_calibrate`.
"""

import sys

from slimstate.system.interruption import STOP

if sys.argv and sys.argv[0].rpartition("/")[2] in ("-m", "slimstate"):
    STOP.listen()  # the command is starting: the imports below take seconds, in which it can be stopped too

from slimstate.benchmark import (
    BenchOptions,
    MixerShape,
    bench_calibrate,
    bench_decode,
    bench_mixer,
    bench_model,
)
from slimstate.evaluation.analyze import AnalysisOptions, analyze
from slimstate.evaluation.evaluate import EvalOptions, evaluate
from slimstate.evaluation.sweep import SweepOptions, sweep
from slimstate.evaluation.sweep_grid import SweepGrid
from slimstate.models.devices import RunOptions
from slimstate.models.offload import LoadOptions
from slimstate.models.prepare import prepare, prepare_fla
from slimstate.pruning.budget import Budget
from slimstate.pruning.estimate import estimate
from slimstate.pruning.inspect import inspect
from slimstate.pruning.options import Calibration, CutOptions
from slimstate.pruning.prune import apply_plan, make_plan, prune
from slimstate.reconstruction.options import ReconstructOptions
from slimstate.reconstruction.reconstruct import reconstruct
from slimstate.report import write_report as report
from slimstate.serving.verification.engine_call import EngineOptions
from slimstate.serving.verification.verify import VerifyOptions, verify
from slimstate.system.errors import SlimstateError
from slimstate.system.progress import Reporter
from slimstate.system.version import __version__
from slimstate.training.options import PretrainOptions, RecoverOptions, TrainerOptions, TrainingText
from slimstate.training.pretrain import train
from slimstate.training.recover import preview, recover

__all__ = [
    "AnalysisOptions",
    "BenchOptions",
    "Budget",
    "Calibration",
    "CutOptions",
    "EngineOptions",
    "EvalOptions",
    "LoadOptions",
    "MixerShape",
    "PretrainOptions",
    "ReconstructOptions",
    "RecoverOptions",
    "Reporter",
    "RunOptions",
    "SlimstateError",
    "SweepGrid",
    "SweepOptions",
    "TrainerOptions",
    "TrainingText",
    "VerifyOptions",
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
    "verify",
]
