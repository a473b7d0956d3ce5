"""Profile a layer's forward pass or a decoding step, kernel by kernel, at several key dims.

    python benchmarks/profiling.py mixer [--model delta_net --key-dims 128,64,32 --batch 32 --length 2048]
    python benchmarks/profiling.py decode [--model delta_net-1.3b --key-dims 128,64 --batch 1024]

On a CPU operators are shown instead of kernels.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from harness import arguments
from torch.profiler import ProfilerActivity, profile

from slimstate.benchmark.options import MixerBenchConfig
from slimstate.benchmark.random_models import config_of, mixer_config, mixer_of, model_for, width_of
from slimstate.benchmark.timing import device_name
from slimstate.models.devices import pick_device, pick_dtype
from slimstate.models.prepare import prepare_fla

ROUNDS, MAX_ROWS = 5, 24


def mixer(model: str, key_dim: int, batch: int, length: int, device: torch.device) -> Callable[[], object]:
    dtype = pick_dtype(None, device)
    config = mixer_config(model, key_dim, MixerBenchConfig(models=(model,)))
    layer = mixer_of(config, device, dtype)
    hidden = torch.randn(batch, length, config["hidden_size"], device=device, dtype=dtype)
    return lambda: layer(hidden_states=hidden)


def decode(model: str, key_dim: int, batch: int, length: int, device: torch.device) -> Callable[[], object]:
    language_model = model_for(model, key_dim, device, pick_dtype(None, device))
    ids = torch.randint(language_model.config.vocab_size, (batch, length), device=device)
    cache = language_model(input_ids=ids, use_cache=True).past_key_values
    return lambda: language_model(input_ids=ids, past_key_values=cache, use_cache=True)


WORKS = {"mixer": mixer, "decode": decode}
DEFAULTS: dict[str, dict[str, Any]] = {
    "mixer": {"model": "delta_net", "batch": 32, "length": 2048},
    "decode": {"model": "delta_net-1.3b", "batch": 1024, "length": 1},
}
TOY: dict[str, dict[str, Any]] = {
    "mixer": {"model": "delta_net", "batch": 1, "length": 64},
    "decode": {"model": "delta_net-5m", "batch": 1, "length": 1},
}


def profile_work(work: Callable[[], object], device: torch.device) -> list[dict[str, Any]]:
    """Return milliseconds and calls of each kernel in one round, the longest first."""
    for _ in range(3):
        work()
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        for _ in range(ROUNDS):
            work()
        if on_gpu:
            torch.cuda.synchronize()
    field = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    events = sorted(profiler.key_averages(), key=lambda event: -getattr(event, field))[:MAX_ROWS]
    return [
        {"kernel": event.key[:100], "ms": getattr(event, field) / 1000 / ROUNDS, "calls": event.count / ROUNDS}
        for event in events
    ]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("what", nargs="?", choices=WORKS, default="mixer")
    parser.add_argument("--model")
    parser.add_argument("--key-dims")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--length", type=int)
    parser.add_argument("--device")
    options = parser.parse_args()
    prepare_fla()
    device = pick_device("cpu" if options.toy else options.device)
    for what, default in (TOY if options.toy else {options.what: DEFAULTS[options.what]}).items():
        model, batch = options.model or default["model"], options.batch or default["batch"]
        length = options.length or default["length"]
        widest = 128 if what == "mixer" else width_of(config_of(model))
        key_dims = [int(part) for part in options.key_dims.split(",")] if options.key_dims else [widest, widest // 2]
        rows = []
        with torch.inference_mode():
            for key_dim in key_dims:
                work = WORKS[what](model, key_dim, batch, length, device)
                rows.append({"key_dim": key_dim, "kernels": profile_work(work, device)})
        settings = {"profile": what, "device": device_name(device), "model": model, "batch": batch, "length": length}
        print(json.dumps({**settings, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
