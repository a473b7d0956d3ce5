"""Time small models of many families, forward and training, with slimstate's functions and with the library's own.

    python benchmarks/families.py [--types mamba2 bamba … --own mamba2 … --batch 16 --length 1024 --rounds 5 --out FILE]

Every model has four layers of size 512 and random weights in float32; on a GPU it computes in bfloat16. The types of
`--own` are also run by transformers without slimstate, with a quarter of the batch, because its scan of Mamba-2 needs
as much more memory. Each case has a process of its own, because what slimstate installs stays.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path
from statistics import median
from typing import Any

import torch
from harness import arguments, last_line_of
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from slimstate.benchmark.timing import device_name, time_rounds
from slimstate.models.devices import pick_device
from slimstate.models.stock import stock_model
from slimstate.records.base import versions

COMMON = {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 8192,
    "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip
SOFTMAX = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
GATED = {
    **SOFTMAX, "layer_types": ["linear_attention"] * 3 + ["full_attention"], "linear_num_key_heads": 4,
    "linear_num_value_heads": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip
SCAN = {
    **SOFTMAX, "mamba_n_heads": 16, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128,
    "mamba_chunk_size": 128,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "delta_net": {"num_heads": 4},
    "gated_deltanet": {"num_heads": 4, "head_dim": 128, "expand_v": 1},
    "comba": {"num_heads": 4, "head_dim": 128, "expand_v": 1},
    "kda": {"num_heads": 4, "head_dim": 128},
    "gla": {"num_heads": 4, "expand_k": 1.0},
    "mamba2": {
        "num_heads": 16, "head_dim": 64, "state_size": 128, "n_groups": 1, "chunk_size": 128, "expand": 2,
    },
    "bamba": {**SCAN, "attn_layer_indices": [3]},
    "falcon_h1": {**SCAN, "mamba_d_ssm": 1024},
    "granitemoehybrid": {
        **SCAN, "layer_types": ["mamba"] * 3 + ["attention"], "num_local_experts": 4, "num_experts_per_tok": 2,
        "shared_intermediate_size": 512,
    },
    "nemotron_h": {
        **SOFTMAX, "mamba_num_heads": 16, "mamba_head_dim": 64, "n_groups": 1, "ssm_state_size": 128,
        "chunk_size": 128, "layers_block_type": ["mamba", "mamba", "attention", "mlp"],
    },
    "zamba2": {
        "mamba_d_state": 128, "mamba_headdim": 64, "n_mamba_heads": 16, "mamba_ngroups": 1, "chunk_size": 128,
        "layers_block_type": ["mamba", "mamba", "mamba", "hybrid"], "num_attention_heads": 4,
        "num_key_value_heads": 4, "num_mem_blocks": 1,
    },
    "qwen3_next": {**GATED, "mlp_only_layers": [0, 1, 2, 3]},
    "qwen3_5_text": GATED,
}  # fmt: skip
SCANS = ("mamba2", "bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "zamba2")
OURS, OWN = "slimstate", "transformers"


def model_of(model_type: str, functions: str, device: torch.device) -> nn.Module:
    """Return a model whose layers run the functions of slimstate, or those that transformers chooses."""
    config = {"model_type": model_type, **COMMON, **MODELS[model_type]}
    torch.manual_seed(0)
    if functions == OURS:
        return stock_model(config, device, torch.float32).train()
    with device:
        model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    return model.train()


def measure(case: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the speed and the memory of a case, "TYPE FUNCTIONS"."""
    model_type, functions = case.split()
    device = pick_device(options.device)
    model = model_of(model_type, functions, device)
    batch = options.batch if functions == OURS else max(1, options.batch // 4)
    ids = torch.randint(COMMON["vocab_size"], (batch, options.length), device=device)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")

    def forward() -> None:
        with torch.no_grad(), autocast:
            model(input_ids=ids, use_cache=False)

    def train() -> None:
        with autocast:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        model.zero_grad(set_to_none=True)

    row: dict[str, Any] = {"model_type": model_type, "functions": functions, "tokens": ids.numel()}
    for name, work in (("forward", forward), ("training", train)):
        seconds, peak = time_rounds(work, device, rounds=options.rounds)
        row[f"{name}_tokens_per_second"] = round(ids.numel() / median(seconds))
    return row if peak is None else {**row, "training_gib": round(peak / 2**30, 2)}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--types", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--own", nargs="*", default=list(SCANS), choices=list(MODELS), help="also without slimstate")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.toy:
        options.types = options.own = ["mamba2"]
        options.batch, options.length, options.rounds, options.device = 1, 32, 1, "cpu"
    if options.only:
        warnings.simplefilter("ignore")
        print(json.dumps(measure(options.only, options)))
        return
    shape = ["--batch", options.batch, "--length", options.length, "--rounds", options.rounds]
    shape += ["--device", options.device] if options.device else []
    rows: list[dict[str, Any]] = []
    command = f"python benchmarks/families.py {' '.join(sys.argv[1:])}".strip()
    record = {"command": command, "device": device_name(pick_device(options.device)), "versions": versions()}
    for model_type in options.types:
        for functions in (OURS, OWN)[: 1 + (model_type in options.own)]:
            rows.append(json.loads(last_line_of(__file__, "--only", f"{model_type} {functions}", *shape)))
            print(json.dumps(rows[-1]), flush=True)
            if options.out is not None:
                options.out.write_text(json.dumps({**record, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
