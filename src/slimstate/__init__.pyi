from .benchmark.options import CalibrateBenchConfig, DecodeBenchConfig, MixerBenchConfig, ModelBenchConfig
from .models.options import LoadOptions, RunOptions
from .models.prepare import prepare, prepare_fla
from .pruning.options import Budget, Calibration, CutOptions
from .reconstruction.options import ReconstructOptions
from .selectors import Selector
from .system.errors import SlimstateError
from .system.progress import Reporter
from .system.version import __version__
from .workflows.analyze import analyze
from .workflows.bench import bench_calibrate, bench_decode, bench_mixer, bench_model
from .workflows.evaluate import evaluate
from .workflows.inspect import inspect
from .workflows.options import (
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
from .workflows.prune import estimate, prune
from .workflows.reconstruct import reconstruct
from .workflows.recover import preview, recover
from .workflows.report import report
from .workflows.sweep import sweep
from .workflows.train import train
from .workflows.verify import verify

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
