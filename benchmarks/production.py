"""Measure a cut and a reconstruction of models of full width with a few layers, and what all their layers would take.

    python benchmarks/production.py [--models qwen3-next-80b … --samples 640 --length 1024 --steps 500 --folder DIR
                                     --rates 2e-3 5e-4 1e-4 --out FILE]

Each model has the shapes of a published one, random weights in bfloat16 and a few of its layers, and is temporary. In
processes of their own: `prune`, `prune --reconstruct`, and the stock class that loads the result. The record has the
seconds, the processor seconds and the peak memory of each, the seconds of a layer of each kind, and an estimate for
all layers: each layer by its kind, and what reads names or weights of all layers by the size of the files. With
`--rates` each layer is also trained at each of these, from the same states, and the record has the errors: the times
are then of all the trainings.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from accelerate import init_empty_weights
from harness import DEMO, StepTimer, add_tokenizer, arguments, last_line_of, peak_memory_kib
from torch import nn

from slimstate import prune
from slimstate.benchmark.random_models import random_model, width_of
from slimstate.benchmark.timing import device_name
from slimstate.checkpoints.reader import Checkpoint
from slimstate.families import family_of
from slimstate.models.devices import pick_device
from slimstate.models.load import load
from slimstate.models.one_layer import OneLayerModel
from slimstate.models.stock import stock_model
from slimstate.reconstruction.fit import Task
from slimstate.reconstruction.options import ReconstructOptions
from slimstate.reconstruction.rates import Attempts, Rates
from slimstate.reconstruction.walk import Walk
from slimstate.records.base import versions
from slimstate.records.training import LayerErrors

GATED = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16, "head_dim": 256}
TEXT = "text.txt"
GROWING = ("reading the weights for their fingerprint", "comparing the tensors with the stock class")  # with the size
# by name: the config of all layers, and what differs in the one with a few layers
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3-next-80b": (
        {
            "model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 16,
            "num_key_value_heads": 2, "linear_num_value_heads": 32, "num_experts": 512, "num_experts_per_tok": 10,
            "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "vocab_size": 151936, **GATED,
        },
        {"num_hidden_layers": 4},
    ),
    "qwen3.5-27b": (
        {
            "model_type": "qwen3_5_text", "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64,
            "num_attention_heads": 24, "num_key_value_heads": 4, "linear_num_value_heads": 48, "vocab_size": 248320,
            **GATED,
        },
        {"num_hidden_layers": 4},
    ),
    "nemotron-h-8b": (
        {
            "model_type": "nemotron_h", "hidden_size": 4096, "intermediate_size": 21504, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8,
            "ssm_state_size": 128, "vocab_size": 131072,
            "layers_block_type": [*["mamba", "mlp"] * 24, *["attention"] * 4],
        },
        {"layers_block_type": ["mamba", "mlp", "attention", "mamba"]},
    ),
    "granite-4-small": (
        {
            "model_type": "granitemoehybrid", "hidden_size": 4096, "intermediate_size": 768, "num_hidden_layers": 40,
            "num_attention_heads": 32, "num_key_value_heads": 8, "mamba_n_heads": 128, "mamba_d_head": 64,
            "mamba_d_state": 128, "mamba_n_groups": 1, "num_local_experts": 72, "num_experts_per_tok": 10,
            "shared_intermediate_size": 1536, "vocab_size": 100352, "position_embedding_type": "nope",
            "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4,
        },
        {"num_hidden_layers": 4, "layer_types": ["mamba", "mamba", "attention", "mamba"]},
    ),
    "kimi-linear-48b": (  # keys and values have one width, and a key dim of half of it cuts both
        {
            "model_type": "kimi_linear", "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 27,
            "num_attention_heads": 32, "num_key_value_heads": 32, "linear_head_dim": 128, "linear_num_heads": 32,
            "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
            "num_local_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 1024, "n_shared_experts": 1,
            "vocab_size": 163840, "pad_token_id": None,
            "layer_types": [*([*["linear_attention"] * 3, "full_attention"] * 7)[:26], "full_attention"],
        },
        {"num_hidden_layers": 4, "layer_types": [*["linear_attention"] * 3, "full_attention"]},
    ),
}  # fmt: skip
TOY: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 64, "vocab_size": 8192, "num_attention_heads": 2, "num_key_value_heads": 2,
    "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 1,
    "ssm_state_size": 32, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 32, "num_local_experts": 4,
    "shared_intermediate_size": 32, "linear_head_dim": 32, "linear_num_heads": 4, "kv_lora_rank": 32,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
}  # fmt: skip


class Watch(StepTimer):
    """Times the steps that a command reports, and the layers of a walk, which are also trained at each of `rates`."""

    def __init__(self, device: torch.device, rates: Sequence[float] = ()) -> None:
        self.device, self.started = device, time.perf_counter()
        self.steps: dict[str, float] = {}
        self.at_rates: dict[int, dict[str, float]] = {}  # by layer: errors on held-out windows
        self.layers: list[dict[str, Any]] = []
        self.reading = 0.0
        walk_layer, convert, fit = Walk._layer, OneLayerModel.convert, Rates.fit

        def timed_layer(walk: Walk, number: int) -> Iterator[LayerErrors]:
            self.steps.setdefault("before the first layer", time.perf_counter() - self.started)
            start, self.reading = time.perf_counter(), 0.0
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            errors = list(walk_layer(walk, number))
            self.layers.append({
                "kind": "linear" if errors else "other", "seconds": time.perf_counter() - start,
                "reading": self.reading, "gpu_peak_bytes": _gpu_peak(device),
                **(_training(errors[0]) if errors else {}),
                **({"at_rates": self.at_rates[number]} if number in self.at_rates else {}),
            })  # fmt: skip
            yield from errors

        def timed_convert(model: OneLayerModel, *args: Any, **options: Any) -> dict[str, torch.Tensor]:
            start = time.perf_counter()
            weights = convert(model, *args, **options)
            self.reading += time.perf_counter() - start
            return weights

        def fit_at_rates(own: Rates, task: Task, layer: int) -> LayerErrors:
            attempts, steps = Attempts(task, partial(own._train, task, layer)), own.settings.steps
            self.at_rates[layer] = {f"{rate:g}": attempts.add(rate, steps) for rate in rates}
            task.load(attempts.cut)
            return fit(own, task, layer)

        Walk._layer, OneLayerModel.convert = timed_layer, timed_convert  # type: ignore[method-assign]
        if rates:
            Rates.fit = fit_at_rates  # type: ignore[method-assign]

    def say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    def add_step(self, label: str, start: float) -> None:
        step = "writing" if label.startswith("writing") else label
        self.steps[step] = self.steps.get(step, 0.0) + time.perf_counter() - start


def _training(errors: LayerErrors) -> dict[str, Any]:
    attempts = [[attempt.learning_rate, attempt.steps, attempt.held_out] for attempt in errors.trial]
    return {
        "held_out": [errors.held_out_before, errors.held_out_after], "rate": errors.learning_rate,
        "training_seconds": errors.seconds, "attempts": attempts,
    }  # fmt: skip


def write_text(path: Path) -> None:
    """Write the bundled text, with its lines in other orders as often as the default windows need."""
    lines, order = (DEMO / "calibration.txt").read_text().splitlines(), random.Random(0)
    path.write_text("\n".join(line for _ in range(6) for line in order.sample(lines, len(lines))))


def _gpu_peak(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else None


def _processor_seconds() -> float:
    """Return those of this process and of processes that it has waited for, such as compilers."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def run(what: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run one of the commands in this process, and return what it took."""
    device = pick_device(options.device)
    watch, processor = Watch(device, options.rates), _processor_seconds()
    model, text = folder / "model", folder / TEXT
    windows = {"samples": options.samples, "length": options.length}
    start = time.perf_counter()
    if what == "load":
        runtime = load(folder / "reconstruct", device=device.type)
        ids = torch.arange(options.length, device=device)[None] % 4096
        with torch.inference_mode():
            assert bool(runtime.model(input_ids=ids, use_cache=False).logits.isfinite().all())
    else:
        key_dim = Checkpoint.open(model).mixers[0].axis.width // 2
        training = ReconstructOptions(steps=options.steps, **windows) if what == "reconstruct" else None
        calibration = windows if training is None else {}
        prune(model, folder / what, key_dim=key_dim, data=str(text), **calibration, reconstruct=training,
              device=device.type, progress=watch)  # fmt: skip
    return {
        "seconds": time.perf_counter() - start, "processor_seconds": _processor_seconds() - processor,
        "steps": watch.steps, "layers": watch.layers, "host_peak_bytes": 1024 * peak_memory_kib(),
        "gpu_peak_bytes": _gpu_peak(device),
    }  # fmt: skip


def save_model(config: dict[str, Any], device: torch.device, folder: Path) -> None:
    """Save a model with random weights, its convolutions from the range of PyTorch.

    transformers draws those of Granite and Nemotron-H with a standard deviation of 0.02, so small that the state adds
    next to nothing, and a cut changes nothing.
    """
    model = random_model(config, device, torch.bfloat16)
    for module in model.modules():
        if isinstance(module, nn.Conv1d):
            module.reset_parameters()
    model.save_pretrained(folder, max_shard_size="4GB")
    add_tokenizer(folder)


def layer_kinds(config: dict[str, Any]) -> dict[str, int]:
    """Return how many layers with and without a mixer a model has, and the bytes of its weights."""
    with init_empty_weights():
        model = stock_model(config, torch.device("cpu"), torch.bfloat16)
    mixers = family_of(config).mixers(config)
    return {
        "linear": len(mixers), "other": model.config.num_hidden_layers - len(mixers),
        "bytes": 2 * sum(parameter.numel() for parameter in model.parameters()),
    }  # fmt: skip


def estimate(measured: dict[str, Any], few: dict[str, int], whole: dict[str, int]) -> dict[str, float]:
    """Return the seconds of a reconstruction of the whole model; the first linear layer compiles and tries rates."""
    layers, steps = measured["layers"], measured["steps"]
    kinds = {kind: [layer["seconds"] for layer in layers if layer["kind"] == kind] for kind in ("linear", "other")}
    first, *next_ones = kinds["linear"]
    kinds["linear"] = next_ones or [first]
    seconds = {kind: median(each) * whole[kind] for kind, each in kinds.items() if each}
    seconds["more for the first"] = first - median(kinds["linear"])
    larger, growing = whole["bytes"] / few["bytes"], {step: steps.get(step, 0.0) for step in GROWING}
    seconds["start"] = steps["before the first layer"] - sum(growing.values())
    seconds |= {step: larger * each for step, each in {**growing, "writing": steps["writing"]}.items()}
    return {**seconds, "total": sum(seconds.values())}


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Make a model, and measure the commands on it."""
    config, fewer = MODELS[name]
    if options.toy:
        config = {**config, **{key: value for key, value in TOY.items() if key in config or key == "intermediate_size"}}
    few = {**config, **fewer}
    device, flags = pick_device(options.device), ["--samples", options.samples, "--length", options.length]
    flags += ["--device", device.type, *(["--steps", options.steps] if options.steps is not None else [])]
    flags += ["--rates", *options.rates] if options.rates else []
    record: dict[str, Any] = {"few": layer_kinds(few), "all": layer_kinds(config), "width": width_of(few)}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        save_model(few, device, Path(folder) / "model")
        write_text(Path(folder) / TEXT)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        for what in ("prune", "reconstruct", "load"):
            if options.toy:  # importing takes longer than all the rest
                record[what] = run(what, Path(folder), options)
            else:
                record[what] = json.loads(last_line_of(__file__, "--only", what, folder, *flags))
            peak = (record[what]["gpu_peak_bytes"] or record[what]["host_peak_bytes"]) / 2**30
            print(f"{name}, {what}: {record[what]['seconds']:.0f} s, {peak:.1f} GiB", file=sys.stderr, flush=True)
    record["estimate"] = estimate(record["reconstruct"], record["few"], record["all"])
    return record


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--samples", type=int, default=640)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--device")
    parser.add_argument("--folder", help="where the models lie while they are measured; default: the system's")
    parser.add_argument("--rates", nargs="+", type=float, default=[], help="that layers are trained at besides")
    parser.add_argument("--out", type=Path, help="a file for the record, written after every model")
    parser.add_argument("--only", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        print(json.dumps(run(options.only[0], Path(options.only[1]), options)))
        return
    if options.toy:
        options.samples, options.length, options.steps = 10, 32, 2
    models: dict[str, Any] = {}
    record = {"command": " ".join(["python", *sys.argv]), "device": device_name(pick_device(options.device))}
    record |= {"versions": versions(), "samples": options.samples, "length": options.length, "models": models}
    for name in options.models:
        models[name] = measure(name, options)
        if options.out is not None:
            options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
