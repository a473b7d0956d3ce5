"""slimstate makes the recurrent state of trained linear-attention language models smaller.

The verbs of the command are functions here: `inspect`, `prune`, `recover`, `train`, `evaluate`, `analyze`, `sweep`,
`report`, `bench_mixer`, `bench_model`, `bench_decode`, `bench_calibrate`.
"""

from slimstate.benchmark import bench_calibrate, bench_decode, bench_mixer, bench_model
from slimstate.evaluation.analyze import analyze
from slimstate.evaluation.evaluate import evaluate
from slimstate.evaluation.sweep import sweep
from slimstate.models.devices import RunOptions
from slimstate.models.prepare import prepare, prepare_fla
from slimstate.pruning.inspect import inspect
from slimstate.pruning.prune import prune
from slimstate.report import write_report as report
from slimstate.system.errors import SlimstateError
from slimstate.system.progress import Reporter
from slimstate.training.options import PretrainOptions, RecoverOptions, TrainerOptions, TrainingText
from slimstate.training.pretrain import train
from slimstate.training.recover import preview, recover

__version__ = "0.1.0"
__all__ = [
    "PretrainOptions",
    "RecoverOptions",
    "Reporter",
    "RunOptions",
    "SlimstateError",
    "TrainerOptions",
    "TrainingText",
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
    "preview",
    "prune",
    "recover",
    "report",
    "sweep",
    "train",
]
