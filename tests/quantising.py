"""Quantised checkpoints from the definitions of the formats: random codes, and what they stand for in float32.

Nothing here uses slimstate, so that it is an oracle. A weight has N rows and K inputs, in groups of G inputs.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])  # the values of a 4-bit float
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # the row in a word whose bits are at this place, from the lowest
G, BLOCK = 16, 16
MLX_NAMES = ("model.language_model.", "language_model.model.")  # elsewhere and in MLX, for a model within another


@dataclass(frozen=True)
class Scheme:
    """How to draw the tensors of a weight [N, K] by a generator, what they stand for, and what the config says."""

    draw: Callable[[int, int, torch.Generator], Tensors]
    values: Callable[[Tensors], Tensor]
    config: dict
    field: str = "quantization_config"


def codes(count: int, *shape: int, by: torch.Generator) -> Tensor:
    return torch.randint(0, count, shape, generator=by)


def scales(*shape: int, by: torch.Generator) -> Tensor:
    return (0.01 + 0.02 * torch.rand(*shape, generator=by)).bfloat16()


def fp8(rows: int, inputs: int, by: torch.Generator) -> Tensor:
    return (torch.randn(rows, inputs, generator=by) * 20).to(torch.float8_e4m3fn)


def in_words(values: Tensor, bits: int, order: list[int] | None = None) -> Tensor:
    """Pack the last dimension into words of 32 bits, the first value lowest, or in another order."""
    count = 32 // bits
    places = values.reshape(*values.shape[:-1], -1, count)[..., order or list(range(count))].to(torch.int64)
    words = sum(places[..., place] << bits * place for place in range(count))
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def from_words(words: Tensor, bits: int, order: list[int] | None = None) -> Tensor:
    count = 32 // bits
    places = torch.stack([(words.to(torch.int64) >> bits * place) % 2**bits for place in range(count)], -1)
    values = torch.empty_like(places)
    values[..., order or list(range(count))] = places
    return values.flatten(-2)


def nibbles(packed: Tensor) -> Tensor:
    """Return the values of 4-bit floats, two in a byte, the first lowest."""
    return E2M1[torch.stack([packed.long() % 16, packed.long() // 16], -1).flatten(-2)]


def by_group(values: Tensor, scale: Tensor) -> Tensor:
    """Return values [N, K] times scales [N, groups], or [N, 1], or []."""
    scale = scale.float().reshape(-1, scale.shape[-1] if scale.ndim > 1 else 1)
    groups = values.shape[1] // scale.shape[1]
    return values.float() * scale.repeat_interleave(groups, 1)


def blocks(tensors: Tensors, name: str) -> Tensor:
    weight, scale = tensors["weight"].float(), tensors[name].float()
    rows, inputs = (scale.repeat_interleave(BLOCK, 0)[: len(weight)], BLOCK)
    return (weight * rows.repeat_interleave(inputs, 1)[:, : weight.shape[1]]).bfloat16().float()


def padded(rows: int) -> int:
    return -(-rows // 8) * 8


def compressed(weights: dict) -> dict:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head"]}


def two_fours(words: Tensor) -> Tensor:
    """Return the 4-bit floats in words of 32 bits, as MLX stores them."""
    return E2M1[from_words(words.view(torch.int32), 4)]


def mlx_draw(bits: int, group: int, affine: bool) -> Callable[[int, int, torch.Generator], Tensors]:
    def draw(n: int, k: int, by: torch.Generator) -> Tensors:
        weight = in_words(codes(2**bits, n, k, by=by), bits).view(torch.uint32)
        if not affine:
            return {"weight": weight, "scales": (100 + codes(16, n, k // group, by=by)).to(torch.uint8)}
        return {"weight": weight, "scales": scales(n, k // group, by=by), "biases": -scales(n, k // group, by=by)}

    return draw


def mlx_values(bits: int) -> Callable[[Tensors], Tensor]:
    def values(t: Tensors) -> Tensor:
        whole = from_words(t["weight"].view(torch.int32), bits)
        return by_group(whole, t["scales"]) + by_group(torch.ones_like(whole), t["biases"])

    return values


def exponents(scale: Tensor) -> Tensor:
    return 2.0 ** (scale.float() - 127)


def mlx(bits: int, group: int, mode: str) -> dict:
    return {"bits": bits, "group_size": group, "mode": mode}


SCHEMES = {
    "ct-fp8": Scheme(
        lambda n, k, by: {"weight": fp8(n, k, by), "weight_scale": scales(n, 1, by=by)},
        lambda t: by_group(t["weight"], t["weight_scale"]),
        compressed({"num_bits": 8, "type": "float", "strategy": "channel"}),
    ),
    "ct-int8": Scheme(
        lambda n, k, by: {
            "weight": (codes(256, n, k, by=by) - 128).to(torch.int8), "weight_scale": scales(n, 1, by=by),
            "weight_zero_point": (codes(20, n, 1, by=by) - 10).to(torch.int8),
        },
        lambda t: by_group(t["weight"].float() - t["weight_zero_point"].float(), t["weight_scale"]),
        compressed({"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False}),
    ),
    "ct-w4": Scheme(
        lambda n, k, by: {
            "weight_packed": in_words(codes(16, n, k, by=by), 4), "weight_scale": scales(n, k // G, by=by),
            "weight_shape": torch.tensor([n, k]),
        },
        lambda t: by_group(from_words(t["weight_packed"], 4) - 8, t["weight_scale"]),
        compressed({"num_bits": 4, "type": "int", "strategy": "group", "group_size": G}),
    ),
    "ct-w4-asymmetric": Scheme(
        lambda n, k, by: {
            "weight_packed": in_words(codes(16, n, k, by=by), 4), "weight_scale": scales(n, k // G, by=by),
            "weight_zero_point": in_words(
                torch.nn.functional.pad(codes(16, k // G, n, by=by), (0, padded(n) - n)), 4
            ).T.contiguous(),
            "weight_shape": torch.tensor([n, k]),
        },
        lambda t: by_group(
            from_words(t["weight_packed"], 4)
            - from_words(t["weight_zero_point"].T, 4).T[: t["weight_shape"][0]].repeat_interleave(G, 1),
            t["weight_scale"],
        ),
        compressed({"num_bits": 4, "type": "int", "strategy": "group", "group_size": G, "symmetric": False}),
    ),
    "ct-nvfp4": Scheme(
        lambda n, k, by: {
            "weight_packed": codes(256, n, k // 2, by=by).to(torch.uint8),
            "weight_scale": scales(n, k // 16, by=by).to(torch.float8_e4m3fn),
            "weight_global_scale": torch.tensor([8.0]),
        },
        lambda t: by_group(nibbles(t["weight_packed"]), t["weight_scale"].float() / t["weight_global_scale"]),
        compressed({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
    ),
    "ct-mxfp4": Scheme(
        lambda n, k, by: {
            "weight_packed": codes(256, n, k // 2, by=by).to(torch.uint8),
            "weight_scale": (115 + codes(8, n, k // 32, by=by)).to(torch.uint8),
        },
        lambda t: by_group(nibbles(t["weight_packed"]), exponents(t["weight_scale"])),
        compressed({"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}),
    ),
    "mlx-4": Scheme(mlx_draw(4, 32, True), mlx_values(4), mlx(4, 32, "affine"), "quantization"),
    "mlx-8": Scheme(mlx_draw(8, 32, True), mlx_values(8), mlx(8, 32, "affine"), "quantization"),
    "mlx-mxfp4": Scheme(
        mlx_draw(4, 32, False), lambda t: by_group(two_fours(t["weight"]), exponents(t["scales"])),
        mlx(4, 32, "mxfp4"), "quantization",
    ),
    "mlx-nvfp4": Scheme(
        mlx_draw(4, 16, False),
        lambda t: by_group(two_fours(t["weight"]), t["scales"].view(torch.float8_e4m3fn)),
        mlx(4, 16, "nvfp4"), "quantization",
    ),
    "modelopt-fp8": Scheme(
        lambda n, k, by: {
            "weight": fp8(n, k, by), "weight_scale": torch.tensor(0.02), "input_scale": torch.tensor(0.5),
        },
        lambda t: by_group(t["weight"], t["weight_scale"]),
        {"quant_method": "modelopt", "quant_algo": "FP8"},
    ),
    "modelopt-nvfp4": Scheme(
        lambda n, k, by: {
            "weight": codes(256, n, k // 2, by=by).to(torch.uint8), "weight_scale_2": torch.tensor(0.25),
            "weight_scale": scales(n, k // 16, by=by).to(torch.float8_e4m3fn), "input_scale": torch.tensor(0.5),
        },
        lambda t: by_group(nibbles(t["weight"]), t["weight_scale"].float() * t["weight_scale_2"]),
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    ),
    "gptq": Scheme(
        lambda n, k, by: {
            "qweight": in_words(codes(16, n, k, by=by), 4).T.contiguous(),
            "qzeros": in_words(codes(15, k // G, n, by=by), 4), "scales": scales(k // G, n, by=by).half(),
            "g_idx": (torch.arange(k) // G).to(torch.int32), "bias": torch.randn(n, generator=by),
        },
        lambda t: (
            (from_words(t["qweight"].T, 4).T - (from_words(t["qzeros"], 4) + 1)[t["g_idx"].long()]).float()
            * t["scales"].float()[t["g_idx"].long()]
        ).T,
        {"quant_method": "gptq", "bits": 4, "group_size": G},
    ),
    "awq": Scheme(
        lambda n, k, by: {
            "qweight": in_words(codes(16, k, n, by=by), 4, AWQ_ORDER),
            "qzeros": in_words(codes(16, k // G, n, by=by), 4, AWQ_ORDER), "scales": scales(k // G, n, by=by).half(),
        },
        lambda t: (
            (from_words(t["qweight"], 4, AWQ_ORDER)
             - from_words(t["qzeros"], 4, AWQ_ORDER).repeat_interleave(G, 0)).float()
            * t["scales"].float().repeat_interleave(G, 0)
        ).T,
        {"quant_method": "awq", "bits": 4, "group_size": G, "version": "gemm"},
    ),
    "fp8-blocks": Scheme(
        lambda n, k, by: {
            "weight": fp8(n, k, by), "weight_scale_inv": scales(-(-n // BLOCK), -(-k // BLOCK), by=by).float(),
        },
        lambda t: blocks(t, "weight_scale_inv"),
        {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"},
    ),
    "ct-fp8-blocks": Scheme(
        lambda n, k, by: {"weight": fp8(n, k, by), "weight_scale": scales(-(-n // BLOCK), -(-k // BLOCK), by=by)},
        lambda t: blocks(t, "weight_scale"),
        compressed({"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [BLOCK, BLOCK]}),
    ),
}  # fmt: skip


def parts_of(tensors: Tensors, module: str) -> Tensors:
    own = {name.removeprefix(f"{module}."): tensor for name, tensor in tensors.items() if name.startswith(f"{module}.")}
    return {name: tensor for name, tensor in own.items() if "." not in name}


def quantise(model: Path, out: Path, scheme: Scheme, chosen: Callable[[str], bool], seed: int = 0) -> list[str]:
    """Copy a model, with random codes for the chosen linear maps; return their modules.

    MLX renames the language model within another, and stores convolutions with taps before the single input.
    """
    shutil.copytree(model, out)
    config = json.loads((out / "config.json").read_text())
    config[scheme.field] = scheme.config
    (out / "config.json").write_text(json.dumps(config))
    by, modules = torch.Generator().manual_seed(seed), []
    for path in sorted(out.glob("*.safetensors")):
        tensors = load_file(path)
        for name in [name for name in tensors if name.endswith(".weight") and chosen(name)]:
            module = name.removesuffix(".weight")
            drawn = scheme.draw(*tensors.pop(name).shape, by)
            tensors |= {f"{module}.{part}": tensor for part, tensor in drawn.items()}
            modules.append(module)
        if scheme.field == "quantization":
            tensors = {
                name.replace(*MLX_NAMES):
                tensor.movedim(1, 2).contiguous() if "conv1d.weight" in name and tensor.ndim == 3 else tensor
                for name, tensor in tensors.items()
            }  # fmt: skip
        save_file(tensors, path, {"format": "pt"})
    (out / "model.safetensors.index.json").unlink(missing_ok=True)
    return [each.replace(*MLX_NAMES) if scheme.field == "quantization" else each for each in modules]
