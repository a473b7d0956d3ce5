"""How fast a model is at every key dim, and what cutting it costs: mixers, whole models, decoding, calibration.

Every verb gives one record: a list of `rows` with medians and spread of repeated timings after a warm-up, the peak
memory, and ratios to the widest key dim, all of one run on one device.
"""

from slimstate.benchmark.bench import BenchOptions
from slimstate.benchmark.calibration import bench_calibrate
from slimstate.benchmark.decoding import bench_decode
from slimstate.benchmark.mixers import bench_mixer
from slimstate.benchmark.models import bench_model
from slimstate.records.benchmark import MixerShape

__all__ = ["BenchOptions", "MixerShape", "bench_calibrate", "bench_decode", "bench_mixer", "bench_model"]
