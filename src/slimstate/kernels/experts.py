"""Experts of transformers: in the dtype of autocast, and computed again in a backward pass instead of saved."""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from slimstate.kernels.patches import recomputed, trains_on_gpu

ALIGNED = 8  # numbers in half precision whose rows the grouped product of a GPU can read


@functools.cache
def prepare_experts() -> None:
    """Make products of experts follow autocast, and training on a GPU compute experts again. Once.

    PyTorch's grouped product ignores autocast (its issue 174763). Every token passes through several experts, so what
    they save is most of the memory of a layer. PEFT's adapters of experts are there in the forward pass alone: experts
    that have them are not computed again.
    """
    from transformers.integrations import moe

    product, experts = moe._grouped_mm, moe.ALL_EXPERTS_FUNCTIONS["grouped_mm"]
    again = recomputed(experts)

    @functools.wraps(product)
    def grouped_mm(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
        device = weight.device.type
        is_aligned = weight.shape[-1] % ALIGNED == weight.shape[-2] % ALIGNED == 0
        if torch.is_autocast_enabled(device) and is_aligned:
            weight = weight.to(torch.get_autocast_dtype(device))
        return product(input, weight, offs)  # it converts the input to the dtype of the weight

    @functools.wraps(experts)
    def forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        saves_inputs = trains_on_gpu(layer, *args, **kwargs) and not is_parametrized(layer)
        result: Tensor = (again if saves_inputs else experts)(layer, *args, **kwargs)
        return result

    moe._grouped_mm = grouped_mm
    moe.ALL_EXPERTS_FUNCTIONS.register("grouped_mm", forward)
