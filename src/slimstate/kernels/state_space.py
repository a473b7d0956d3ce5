"""The state space of Mamba-2, in which the heads of a group share their keys and queries.

Z batch, T time, H heads of P channels in G groups of R, N state channels. x [Z, T, H, P]; steps dt [Z, T, H]; B, the
keys, and C, the queries [Z, T, G, N]; A and D [H]; states [Z, H, P, N].

    S_t = e^{A dt_t} S_{t-1} + dt_t x_t B_t',   y_t = S_t C_t + D x_t

This is gated linear attention with the values dt x and the decay g = A dt. On a CPU its scan by heads runs. On a GPU
that is `mamba-ssm` if transformers has it, or fla's kernel, both in half precision only, because they round float32 to
TF32; or `grouped`. There the decays are applied to values and outputs, not to keys and queries, which therefore are
not repeated for each head: a chunk has one matrix of products for each group, and its state is one product.
"""

import importlib.util
import inspect
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from slimstate.kernels import gla
from slimstate.kernels.chunks import lower, split_time
from slimstate.kernels.fla_calls import per_value_head, wide
from slimstate.kernels.patches import (
    IN_PYTORCH,
    Patch,
    has_fla,
    has_float64,
    needs_gradient,
    recomputed,
    saves_for_backward,
    too_precise_for_triton,
)

CHUNK = 64  # tokens of a chunk on a GPU, where decays between its tokens cost as much as its state
# elements of the decays between tokens that are in memory at once, and chunks of a segment
MAX_ELEMENTS, MAX_CHUNKS = 2**25, 128
BY_TOKEN = 5  # the first of `Inputs` are by token
# channels of keys, or of values in a backward pass, below which kernels of fla have made illegal memory accesses
MIN_CHANNELS_OF_FLA = 64
RESET = -200.0  # the logarithm of the decay before the first token of a packed sequence: e^-200 is 0 in float32
# what layers of transformers pass to the scan of mamba-ssm
ARGUMENTS = ("chunk_size", "D", "z", "dt_bias", "initial_states", "dt_softplus", "dt_limit", "return_final_states")


class Inputs(NamedTuple):
    """The tensors of a scan, with the steps and decays of each token, or the gradient of each."""

    x: Tensor
    step: Tensor
    g: Tensor  # the logarithm of the decay, A dt
    B: Tensor
    C: Tensor
    D: Tensor
    state: Tensor

    def at(self, tokens: slice) -> "Inputs":
        by_token: Any = (x[:, tokens] for x in self[:BY_TOKEN])
        return Inputs(*by_token, *self[BY_TOKEN:])


def state_space_scan(
    hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Tensor | None = None,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the scan as the layers of transformers call it; `chunk_size` is that of other kernels."""
    (batch, _, heads, channels), device = hidden_states.shape, hidden_states.device.type
    x = hidden_states
    if device != "cpu" and torch.is_autocast_enabled(device):  # layers may multiply by float32 before the scan
        x, B, C = (tensor.to(torch.get_autocast_dtype(device)) for tensor in (x, B, C))
    bias, first, packed, z = (options.get(name) for name in ("dt_bias", "initial_states", "seq_idx", "z"))
    step = dt if bias is None else dt + bias.to(dt.dtype)
    step = F.softplus(step) if options.get("dt_softplus") else step
    step = wide(torch.clamp(step, *options.get("dt_limit", (0.0, None))))
    g = A.to(step) * step
    if packed is not None:
        g = g.masked_fill(F.pad(packed.diff(dim=1) != 0, (1, 0)).unsqueeze(-1), RESET)
    skip = step.new_zeros(heads) if D is None else D.to(step)
    state = step.new_zeros(batch, heads, channels, B.shape[-1]) if first is None else first.to(step)
    inputs = Inputs(x=x, step=step, g=g, B=B, C=C, D=skip, state=state)
    y, last = form_for(inputs)(inputs)
    y = y if z is None else y * F.silu(z)
    return (y, last) if options.get("return_final_states") else y


def form_for(inputs: Inputs) -> Callable[[Inputs], tuple[Tensor, Tensor]]:
    """Return how to compute a scan: by head on a CPU and for one token, else by fla's kernel where it is right."""
    if inputs.x.device.type == "cpu" or inputs.x.shape[1] == 1:
        return by_head
    keys, values = inputs.B.shape[-1], inputs.x.shape[-1]
    narrow = keys < MIN_CHANNELS_OF_FLA or (values < MIN_CHANNELS_OF_FLA and needs_gradient(*inputs))
    if too_precise_for_triton(inputs.x) or narrow or IN_PYTORCH.get() or not has_fla():
        return grouped
    return by_fla_again if saves_for_backward(*inputs) else by_fla


def by_head(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return the outputs, in float32 for half precision, and the last state, with keys and queries for each head."""
    x, step, g, B, C, D, state = (wide(tensor) for tensor in inputs)
    form = gla.recurrence if x.shape[1] == 1 else gla.chunked
    y, last = form(C, B, x * step.unsqueeze(-1), g, state=state.mT)
    return torch.addcmul(y, D.unsqueeze(-1), x), last.mT.contiguous()


def by_fla(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return the same from fla's kernel, in half precision."""
    from fla.ops.simple_gla import chunk_simple_gla

    x, step, g, B, C, D, state = inputs
    values = (x * step.unsqueeze(-1)).to(x.dtype)
    queries, keys = (per_value_head(tensor, x) for tensor in (C, B))
    y, last = chunk_simple_gla(
        queries, keys, values, g, scale=1.0, initial_state=state.mT.contiguous(), output_final_state=True
    )
    return torch.addcmul(y, D.unsqueeze(-1).to(y), x), last.mT.contiguous()


by_fla_again = recomputed(by_fla)  # the backward pass computes keys and queries per head again


def grouped(inputs: Inputs, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """Return the outputs, in the dtype of x, and the last state, computed by matrix products for whole groups."""
    # a convolution leaves the time as the last axis in memory, along which all products below would copy
    tensors = (tensor.contiguous() for tensor in inputs)
    return _Grouped.apply(min(chunk, inputs.x.shape[1]), *tensors)  # type: ignore[no-untyped-call]


class _Grouped(torch.autograd.Function):
    """The scan, one segment after another; the gradient computes each again from the state before it.

    Saved are the inputs and a state for each segment, so memory does not grow with what is computed in a segment.
    """

    @staticmethod
    def forward(ctx: Any, chunk: int, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        inputs = Inputs(*tensors)
        y, states = torch.empty_like(inputs.x), [inputs.state]
        with torch.autocast(y.device.type, enabled=False):
            for tokens in _segments(inputs, chunk):
                y[:, tokens], last = _scan(inputs.at(tokens)._replace(state=states[-1]), chunk)
                states.append(last)
        ctx.chunk = chunk
        ctx.save_for_backward(*inputs[:-1], *states[:-1])
        return y, states[-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_output: Tensor, by_last: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors  # once, because checkpoints do not give it again
        inputs, states = Inputs(*saved[:7]), saved[6:]
        into = Inputs(*map(torch.empty_like, inputs))._replace(D=torch.zeros_like(inputs.D), state=by_last)
        segments = zip(_segments(inputs, ctx.chunk), states, strict=True)
        for tokens, state in reversed(list(segments)):
            part = Inputs(*(x.detach().requires_grad_() for x in inputs.at(tokens)._replace(state=state)))
            with torch.enable_grad(), torch.autocast(state.device.type, enabled=False):
                results = _scan(part, ctx.chunk)
            gradients = Inputs(*torch.autograd.grad(results, part, (by_output[:, tokens], into.state)))
            for target, gradient in zip(into.at(tokens)[:BY_TOKEN], gradients, strict=False):
                target.copy_(gradient)
            into = into._replace(D=into.D + gradients.D, state=gradients.state)
        return None, *into


def _segments(inputs: Inputs, chunk: int) -> list[slice]:
    """Return the tokens that are computed at once: whole chunks, as many as memory allows."""
    batch, time, heads, _ = inputs.x.shape
    size = chunk * max(1, min(MAX_ELEMENTS // (batch * heads * chunk**2), MAX_CHUNKS))
    return [slice(start, min(start + size, time)) for start in range(0, time, size)]


def _scan(inputs: Inputs, chunk: int) -> tuple[Tensor, Tensor]:
    """Return the outputs and the last state of a segment.

    In the letters of einsum z is the batch, n a chunk, t and s its tokens, g a group, r its heads, k a state channel.
    """
    time, groups = inputs.x.shape[1], inputs.B.shape[2]
    x, step, g, B, C = (split_time(tensor, chunk) for tensor in inputs[:BY_TOKEN])
    heads, dtype = (groups, x.shape[3] // groups), x.dtype
    x, step, g = (tensor.unflatten(3, heads) for tensor in (x, step, g))
    values = x * step.unsqueeze(-1)
    # differences of large sums: in float32 a decay of e^-50 would leave few digits for the tokens after it
    total = (g if dtype.itemsize == 2 else g.double()).cumsum(2)
    end = total[:, :, -1:]
    between = _decays(total.movedim(2, -1), step.dtype)
    scores = torch.einsum("zntgk,znsgk->zngts", C, B)
    weights = (scores.unsqueeze(3) * between).to(dtype)
    y = torch.einsum("zngrts,znsgrp->zntgrp", weights, values.to(dtype))
    to_end = (end - total).to(step).exp().unsqueeze(-1)
    added = torch.einsum("znsgk,znsgrp->zngrpk", B, (values * to_end).to(dtype))
    first = inputs.state.unflatten(1, heads).unsqueeze(1)
    ends = F.pad(end.squeeze(2).double().cumsum(1), (0, 0, 0, 0, 1, 0))
    carried = _decays(ends.movedim(1, -1), step.dtype)
    states = torch.einsum("zgrmn,zngrpk->zmgrpk", carried, torch.cat([first, added.to(step)], 1))
    read = torch.einsum("zntgk,zngrpk->zntgrp", C, states[:, :-1].to(dtype))
    y = torch.addcmul(y, read, total.to(step).exp().unsqueeze(-1))
    y = torch.addcmul(y, inputs.D.view(*heads, 1), x).to(dtype)
    return y.flatten(3, 4).flatten(1, 2)[:, :time], states[:, -1].flatten(1, 2)


def _decays(total: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the decay from each place to each later one [..., t, s], 0 above the diagonal, from sums of logarithms."""
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).to(dtype)
    return between.masked_fill(~lower(total.shape[-1], 0, total.device), -torch.inf).exp()


@cache
def has_mamba_ssm() -> bool:
    """Return whether the scan of mamba-ssm can be used; warn, once, of one that is installed and cannot."""
    if importlib.util.find_spec("mamba_ssm") is None:
        return False
    try:
        scan = importlib.import_module("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined
        missing = set(ARGUMENTS) - inspect.signature(scan).parameters.keys()
        fault = f"its scan has no argument {', '.join(sorted(missing))}" if missing else None
    except Exception as error:  # a build for another version of torch or CUDA fails in many ways
        fault = f"it has no scan that can be imported ({error!r})"
    if fault is not None:
        advice = "slimstate's own scan runs; mamba-ssm 2 built for this version of torch would be used"
        warnings.warn(f"mamba-ssm is passed over: {fault}: {advice}", stacklevel=2)
    return fault is None


def needs_our_scan(*args: Any, **kwargs: Any) -> bool:
    """Return whether the scan of transformers is not the kernel of mamba-ssm, or would round its inputs."""
    is_better = too_precise_for_triton(*args, **kwargs) or not has_mamba_ssm()
    return is_better and has_float64(*args, **kwargs)


IN_TRANSFORMERS = (Patch("mamba2_chunk_scan", state_space_scan, needs_our_scan),)
