"""Products of experts in the dtype of autocast.

PyTorch's grouped product ignores autocast (its issue 174763): experts with weights in float32 compute in float32, next
to layers that compute in bfloat16.
"""

import functools

import torch
from torch import Tensor

ALIGNED = 8  # numbers in half precision whose rows the grouped product of a GPU can read


@functools.cache
def follow_autocast() -> None:
    """Make transformers' grouped product follow autocast, as its other products do. A second call does nothing."""
    from transformers.integrations import moe

    original = getattr(moe, "_grouped_mm", None)
    if original is None:
        return

    @functools.wraps(original)
    def grouped_mm(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
        device = weight.device.type
        is_aligned = weight.shape[-1] % ALIGNED == weight.shape[-2] % ALIGNED == 0
        if torch.is_autocast_enabled(device) and is_aligned:
            weight = weight.to(torch.get_autocast_dtype(device))
        product: Tensor = original(input.to(weight.dtype), weight, offs)
        return product

    moe._grouped_mm = grouped_mm
