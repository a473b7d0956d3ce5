"""Measure peak memory and time of a cut, and of its reconstruction, on a checkpoint far larger than that memory.

    python benchmarks/large.py [--experts 128 --layers 8 --method l1] [--reconstruct --dtype float32]
    python benchmarks/large.py --fp8 --experts 512

The checkpoint has the shape of Qwen3-Next (8 GB by default) with random weights in shards of 1 GB, and is temporary.
With --fp8 the weights of linear maps are FP8 in blocks of 128 x 128, named as Qwen publishes them, in a shard a layer.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from harness import add_tokenizer, arguments, last_line_of, peak_memory_kib
from safetensors.torch import save_file

from slimstate import prune
from slimstate.benchmark.random_models import random_model
from slimstate.models.compact_weights import CompactWeight
from slimstate.models.stock import stock_model
from slimstate.reconstruction.options import ReconstructOptions
from slimstate.reconstruction.walk import Layer, Walk
from slimstate.records.training import LayerErrors

TEXT = Path(__file__).parent.parent / "demo" / "calibration.txt"
QWEN3_NEXT = {
    "model_type": "qwen3_next", "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2,
    "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 10, "vocab_size": 151936, "tie_word_embeddings": False,
}  # fmt: skip


FEW = ReconstructOptions(steps=2, batch=2, samples=4, length=256)


class MemoryWatch:
    """Records the memory of the first layer of a walk: when the walk begins, and when the layer is loaded."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}
        begin, train = Walk.layers, Walk._reconstruct

        def beginning(walk: Walk) -> Iterator[LayerErrors]:
            self.bytes["before_the_first_layer"] = psutil.Process().memory_info().rss
            self.bytes["hidden_states"] = walk.uncut_stream.states.bytes + walk.cut_stream.states.bytes
            return begin(walk)

        def training(walk: Walk, layer: Layer, places: Sequence[str], *details: Any) -> LayerErrors:
            if layer.number == 0:
                self.bytes["peak_before_it_is_trained"] = 1024 * peak_memory_kib()
                experts = [weight.stored for weight in layer.weights.values() if isinstance(weight, CompactWeight)]
                others = [weight for weight in layer.weights.values() if not isinstance(weight, CompactWeight)]
                self.bytes |= {"experts": _bytes(experts), "other_weights": _bytes(others)}
                trained = [walk.cut_model.model.get_submodule(each).parameters() for each in places]
                self.bytes["trained_weights"] = _bytes(weight for each in trained for weight in each)
            return train(walk, layer, places, *details)

        Walk.layers, Walk._reconstruct = beginning, training  # type: ignore[method-assign]


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def write_fp8(config: dict[str, Any], folder: Path) -> None:
    """Write a random checkpoint with weights in FP8, one layer in memory at a time."""
    folder.mkdir()
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    shards: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for name, tensor in stock_model(config).state_dict().items():
        shard = f"layer-{name.split('.')[2]}" if ".layers." in name else name.partition(".weight")[0]
        shards.setdefault(f"model-{shard}.safetensors", []).extend(_published(name, tuple(tensor.shape)))
    for shard, entries in shards.items():
        tensors = {}
        for name, shape in entries:
            if _is_fp8(name):
                codes = torch.empty(shape, dtype=torch.uint8).random_(256).bitwise_and_(0xBF)  # below 2, and no NaN
                tensors[name] = codes.view(torch.float8_e4m3fn)
                blocks = [-(-size // 128) for size in shape]
                tensors[f"{name}_scale_inv"] = 0.01 + 0.02 * torch.rand(blocks)
            else:
                tensors[name] = 0.02 * torch.randn(shape, dtype=torch.bfloat16)
        save_file(tensors, folder / shard, {"format": "pt"})
    places = {name: shard for shard, entries in shards.items() for name, _ in entries}
    places |= {f"{name}_scale_inv": shard for name, shard in places.items() if _is_fp8(name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def _published(name: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """Return the tensors in published files that make up a parameter: experts are one by one there."""
    path, _, part = name.rpartition(".experts.")
    if not path:
        return [(name, shape)]
    experts, rows, inputs = shape
    parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
    each = (rows // len(parts), inputs)
    return [(f"{path}.experts.{expert}.{one}.weight", each) for expert in range(experts) for one in parts]


def _is_fp8(name: str) -> bool:
    return name.endswith(("proj.weight", "in_proj_qkvz.weight"))


def cut_alone(folder: Path, options: argparse.Namespace) -> None:
    """Cut in this process, which has nothing else in memory, and print seconds and memory."""
    start, before, watch = time.perf_counter(), peak_memory_kib(), MemoryWatch()
    training = {"data": str(TEXT), "reconstruct": FEW} if options.reconstruct else {}
    config = {"method": options.method, "key_dim": 64, "device": "cpu", "dtype": options.dtype, **training}
    record = prune(folder / "model", folder / "cut", **config, progress=False)
    assert record.key_dim == 64
    seconds, peak = time.perf_counter() - start, peak_memory_kib()
    measured = {"seconds": seconds, "peak_bytes": 1024 * peak, "peak_bytes_before": 1024 * before}
    print(json.dumps({**measured, "first_layer_bytes": watch.bytes or None}))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--method", default="l1")
    parser.add_argument("--fp8", action="store_true", help="cut a checkpoint in FP8")
    parser.add_argument("--reconstruct", action="store_true", help="also train each cut layer on a few windows")
    parser.add_argument("--dtype", help="data type of layers during the reconstruction")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        cut_alone(Path(options.only), options)
        return
    config = {**QWEN3_NEXT, "num_hidden_layers": options.layers, "num_experts": options.experts}
    if options.toy:
        config |= {"hidden_size": 64, "num_hidden_layers": 4, "num_experts": 4, "vocab_size": 8192}
        config |= {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
        config |= {"num_attention_heads": 2, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        if options.fp8:
            write_fp8(config, place / "model")
        else:
            random_model(config, torch.device("cpu"), torch.bfloat16).save_pretrained(
                place / "model", max_shard_size="100KB" if options.toy else "1GB"
            )
        add_tokenizer(place / "model")
        shards = sorted((place / "model").glob("*.safetensors"))
        flags = ["--reconstruct"] if options.reconstruct else []
        flags += ["--dtype", options.dtype] if options.dtype else []
        measured = last_line_of(__file__, "--only", folder, "--method", options.method, *flags)
        record = {
            "layers": config["num_hidden_layers"],
            "experts": config["num_experts"],
            "method": options.method,
            "reconstructed": vars(FEW) if options.reconstruct else None,
            "dtype": options.dtype,
            "fp8": options.fp8,
            "checkpoint_bytes": sum(path.stat().st_size for path in shards),
            "shards": len(shards),
            **json.loads(measured),
        }
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
