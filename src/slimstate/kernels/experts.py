"""Products of experts in the dtype of autocast, which PyTorch's grouped product ignores (its issue 174763)."""

import functools

import torch
from torch import Tensor

ALIGNED = 8  # numbers in half precision whose rows the grouped product of a GPU can read


@functools.cache
def follow_autocast() -> None:
    """Make transformers' grouped product follow autocast, as its other products do. A second call does nothing."""
    from transformers.integrations import moe

    original = moe._grouped_mm

    @functools.wraps(original)
    def grouped_mm(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
        device = weight.device.type
        is_aligned = weight.shape[-1] % ALIGNED == weight.shape[-2] % ALIGNED == 0
        if torch.is_autocast_enabled(device) and is_aligned:
            weight = weight.to(torch.get_autocast_dtype(device))
        return original(input, weight, offs)  # it converts the input to the dtype of the weight

    moe._grouped_mm = grouped_mm
