"""Peak memory and time of a cut that looks at weights only, on a checkpoint far larger than that memory.

    python benchmarks/large.py [--experts 128 --layers 8 --method l1]

The checkpoint is shaped like Qwen3-Next (8 GB by default) with random weights in shards of 1 GB, made and removed here.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from harness import add_tokenizer, arguments, last_line_of, peak_memory_kib

from slimstate.benchmark.random_models import random_model
from slimstate.pruning.prune import prune

QWEN3_NEXT = {
    "model_type": "qwen3_next", "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2,
    "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 10, "vocab_size": 151936, "tie_word_embeddings": False,
}  # fmt: skip


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--method", default="l1")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        started = time.perf_counter()
        record = prune(Path(options.only) / "model", Path(options.only) / "cut", method=options.method, key_dim=64)
        assert record.key_dim == 64
        print(json.dumps({"seconds": time.perf_counter() - started, "peak_bytes": 1024 * peak_memory_kib()}))
        return
    config = {**QWEN3_NEXT, "num_hidden_layers": options.layers, "num_experts": options.experts}
    if options.toy:
        config |= {"hidden_size": 64, "num_hidden_layers": 4, "num_experts": 4, "vocab_size": 256}
        config |= {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
        config |= {"num_attention_heads": 2, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        random_model(config, torch.device("cpu"), torch.bfloat16).save_pretrained(
            place / "model", max_shard_size="100KB" if options.toy else "1GB"
        )
        add_tokenizer(place / "model")
        shards = sorted((place / "model").glob("*.safetensors"))
        measured = last_line_of(__file__, "--only", folder, "--method", options.method)
        record = {
            "layers": config["num_hidden_layers"],
            "experts": config["num_experts"],
            "method": options.method,
            "checkpoint_bytes": sum(path.stat().st_size for path in shards),
            "shards": len(shards),
            **json.loads(measured),
        }
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
