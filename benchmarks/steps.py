"""Time and profile a forward pass and a training step of whole models on a CPU.

    python benchmarks/steps.py [--models FOLDER ... --batch 2 --length 512 --threads 2 --rounds 5 --against SOURCES]

With `--against`, the folder `src` of another version, both versions take turns, each in a process of its own. A
training step is forward, backward and AdamW; times are the shortest of all rounds. Profiles use one thread, because the
profiler sees only one. A small Qwen3-Next with random weights is added to the models.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import DEMO, add_tokenizer, arguments
from torch.profiler import ProfilerActivity, profile

from slimstate.benchmark.random_models import random_model
from slimstate.models.load import load

QWEN = {
    "model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], "vocab_size": 512, "hidden_size": 256,
    "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 64,
    "linear_value_head_dim": 64, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128, "full_attention_interval": 4,
}  # fmt: skip
KINDS = ("forward", "training step")
# an operation belongs to the first group with a part of its name or of the name of an enclosing operation
GROUPS = {
    "AdamW": ("_foreach", "Optimizer", "fused_adam"),
    "products of chunks": ("aten::bmm", "aten::baddbmm"),
    "triangular solves": ("triangular",),
    "products of layers": ("aten::mm", "aten::addmm", "grouped_mm"),
    "convolutions": ("conv",),
    "loss": ("softmax", "nll_loss", "cross_entropy"),
    "copies": ("aten::copy_", "aten::clone", "aten::cat", "aten::stack", "aten::index", "aten::embedding"),
    "by element": ("aten::",),
}


def works(folder: Path, batch: int, length: int) -> dict[str, Callable[[], None]]:
    model = load(folder, device="cpu", dtype="float32").model.train()
    ids = torch.randint(model.config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def forward() -> None:
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)

    def training_step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return {"forward": forward, "training step": training_step}


def group_of(event: Any) -> str:
    names = []
    while event is not None:
        names.append(event.name)
        event = event.cpu_parent
    for group, parts in GROUPS.items():
        if any(part in name for name in names for part in parts):
            return group
    return "Python and autograd"


def profile_work(work: Callable[[], None]) -> dict[str, float]:
    """Return the share of the time by group; time outside of operations is that of Python."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        start = time.perf_counter()
        work()
        total = time.perf_counter() - start
    shares: Counter[str] = Counter()
    for event in profiler.events():
        shares[group_of(event)] += event.self_cpu_time_total / 1e6 / total
    shares["Python and autograd"] += 1 - sum(shares.values())
    return dict(shares.most_common())


def serve(options: argparse.Namespace) -> None:
    """Time or profile the work that each line of the input names, and print the result as JSON."""
    torch.set_num_threads(options.threads)
    work = works(Path(options.models[0]), options.batch, options.length)
    for line in sys.stdin:
        way, _, kind = line.strip().partition(" ")
        if way == "profile":
            torch.set_num_threads(1)
            work[kind]()
            print(json.dumps(profile_work(work[kind])), flush=True)
            continue
        clock, processor = time.perf_counter(), time.process_time()
        work[kind]()
        print(json.dumps([time.perf_counter() - clock, time.process_time() - processor]), flush=True)


def request(server: subprocess.Popen[str], way: str, kind: str) -> Any:
    assert server.stdin is not None
    assert server.stdout is not None
    print(way, kind, file=server.stdin, flush=True)
    return json.loads(server.stdout.readline())


def in_turns(folder: Path, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the shortest seconds of each version for each kind of work, and their profile with one thread."""
    command = [sys.executable, __file__, "--here", "--models", folder]
    command += ["--batch", options.batch, "--length", options.length, "--threads", options.threads]
    versions = {"now": "", **({"before": options.against} if options.against else {})}
    servers = {}
    for version, sources in versions.items():
        path = {"PYTHONPATH": sources} if sources else {}
        servers[version] = subprocess.Popen(
            [str(word) for word in command], env={**os.environ, **path}, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    seconds: dict[str, dict[str, list[float]]] = {version: {} for version in versions}
    for turn in range(options.rounds + 1):
        for version, server in servers.items():
            for kind in KINDS:
                seconds_now = request(server, "time", kind)
                if turn:  # the first one warms up
                    best = seconds[version].get(kind, seconds_now)
                    seconds[version][kind] = [min(pair) for pair in zip(best, seconds_now, strict=True)]
    shares = {
        version: {kind: request(server, "profile", kind) for kind in KINDS} for version, server in servers.items()
    }
    for server in servers.values():
        server.communicate()
    return {"seconds": seconds, "shares": shares}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="*", default=[str(DEMO / "model")])
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--against")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.toy:
        options.batch, options.length, options.rounds = 1, 16, 1
    if options.here:
        serve(options)
        return
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        random_model(QWEN, torch.device("cpu"), torch.float32).save_pretrained(scratch)
        add_tokenizer(Path(scratch))
        for folder in [*map(Path, options.models), Path(scratch)]:
            name = "Qwen3-Next, small" if str(folder) == scratch else folder.name
            rows.append({"model": name, **in_turns(folder, options)})
            print(name, file=sys.stderr, flush=True)
    settings = {"batch": options.batch, "length": options.length, "threads": options.threads, "rounds": options.rounds}
    print(json.dumps({"benchmark": "steps", "torch": torch.__version__, **settings, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
