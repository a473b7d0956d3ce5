"""The short convolutions of fla's layers: causal, one filter for each channel.

B batch, T time, D channels, W taps. With `cu_seqlens` N sequences lie end to end in a batch of one.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slimstate.kernels.fla_calls import Packing, Result, wide
from slimstate.kernels.patches import Backend, Patch


def short_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None,
    initial_state: Tensor | None = None, output_final_state: bool | None = False, activation: str | None = None,
    **options: Any,
) -> Result:  # fmt: skip
    """Convolve [B, T, D] with causal filters [D, W]; states [N, D, W] are the last W inputs."""
    cu_seqlens = options.get("cu_seqlens")
    packing = Packing(cu_seqlens)
    inputs = packing.pad(x)
    (batch, time, channels), taps = inputs.shape, weight.shape[-1]
    past = inputs.new_zeros(batch, taps, channels) if initial_state is None else initial_state.mT.to(inputs)
    padded = torch.cat([past, inputs], dim=1)
    kernel, shifted = wide(weight), wide(padded)
    y = shifted[:, 1 : time + 1] * kernel[:, 0]
    for tap in range(1, taps):
        y = torch.addcmul(y, shifted[:, tap + 1 : tap + 1 + time], kernel[:, tap])
    y = packing.pack(_biased(y, bias, activation).to(x.dtype))
    y = y if residual is None else y + residual
    if not output_final_state:
        return y, None
    lengths = torch.full((batch,), time, device=x.device) if cu_seqlens is None else cu_seqlens.diff()
    last = lengths.view(-1, 1, 1) + torch.arange(taps, device=x.device).view(1, -1, 1)
    return y, padded.gather(1, last.expand(-1, -1, channels)).mT.contiguous()


def convolution_step(
    x: Tensor, cache: Tensor, residual: Tensor | None = None, weight: Tensor | None = None, bias: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Convolve one token of each of N sequences; the cache [N, D, W] is updated in place."""
    assert weight is not None
    rolled = torch.cat([cache[..., 1:], x.reshape(cache.shape[0], -1, 1).to(cache.dtype)], dim=-1)
    cache.copy_(rolled)
    y = (wide(rolled) * wide(weight)).sum(-1)
    y = _biased(y, bias, activation).to(x.dtype).view_as(x)
    return (y if residual is None else y + residual), cache


def _biased(y: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    y = y if bias is None else y + bias
    return F.silu(y) if activation in ("silu", "swish") else y


PATCHES = (
    Patch("fla.layers.gated_deltanet.causal_conv1d", short_convolution),
    Patch("fla.modules.causal_conv1d.ops.causal_conv1d", short_convolution),
    Backend("fla.modules.causal_conv1d.ops.causal_conv1d_update", convolution_step),
)
