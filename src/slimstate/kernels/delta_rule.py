"""The delta rule in PyTorch: DeltaNet, with a decay by head (Gated DeltaNet) or by channel (Kimi Delta Attention),
with another vector to erase by (Comba), and with several updates for each token (DeltaProduct).

There is the recurrence to read, and the chunked form to run.

B batch, T time, H query/key heads, G value heads (a multiple of H), K key dim, V value dim.
q, k [B, T, H, K]; v [B, T, G, V]; beta [B, T, G]; g, the logarithm of the decay, [B, T, G], for every channel
[B, T, G, K], or None; state [B, G, K, V].

    S_t = e^{g_t} S_{t-1} + k_t u_t',   u_t = beta_t (v_t - e^{g_t} S_{t-1}' k_t),   o_t = scale S_t' q_t

With `erase` p [B, T, H, K], as in Comba, it is u_t = beta_t (v_t - S_{t-1}' p_t): what to erase is looked up by another
vector, and in the state before its decay. This is what fla's kernels and its `naive_chunk_comba` compute; in its
`naive_recurrent_comba` the state decays first.

The gated delta product has n updates for each token, then one output: k, v and beta are n times as long as q and g. The
state decays before the first update of a token and is read after the last: this is the delta rule on n times as many
steps, of which most have no decay and no query.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slimstate.kernels.chunk_scan import Inputs, Outputs, Rule, chunk_scan, zero_state
from slimstate.kernels.fla_calls import CallOptions, Result, apply_decay, call, per_value_head, wide
from slimstate.kernels.patches import Backend, Patch, in_place_of, needs_torch_gated_rule, too_precise_for_triton


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None = None,
    *, scale: float, state: Tensor | None = None, erase: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the outputs and the last state, computed one token after the other as in the definition."""
    q, k, by = (per_value_head(x, v) for x in (q, k, k if erase is None else erase))
    state = zero_state(k, v) if state is None else state
    outputs = []
    for t in range(q.shape[1]):
        before, state = state, apply_decay(state, g, t)
        recalled = torch.einsum("bhkv,bhk->bhv", state if erase is None else before, by[:, t])
        update = beta[:, t].unsqueeze(-1) * (v[:, t] - recalled)
        state = state + k[:, t].unsqueeze(-1) * update.unsqueeze(-2)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) * scale)
    return torch.stack(outputs, dim=1), state


def chunked(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None = None,
    *, state: Tensor | None = None, erase: Tensor | None = None, **rule: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the same, computed C tokens at a time: the updates of a chunk solve a unit triangular system."""
    q, k = per_value_head(q, v), per_value_head(k, v)
    by = None if erase is None else per_value_head(erase, v)
    inputs = Inputs(q=q, k=k, v=v, g=g, beta=beta, erase=by, state=state)
    return chunk_scan(inputs, Rule(early_erase=erase is not None, **rule))


def delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None = None, **options: Any) -> Outputs:
    """Return the outputs and the last state, computed in the form that is faster for this length."""
    return (recurrence if q.shape[1] == 1 else chunked)(q, k, v, beta, g, **options)


def plain_delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None = None, **options: Any) -> Result:
    """Compute the rule without a decay, as fla's layers call it."""
    beta = torch.ones_like(q[..., 0]) if beta is None else beta
    return call(delta_rule, CallOptions.read(options), q=q, k=k, v=v, beta=beta)


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, **options: Any) -> Result:
    """Compute the rule with a decay, as fla's layers call it."""
    settings = CallOptions.read(options)
    return call(delta_rule, settings, q=q, k=k, v=v, beta=settings.strength(beta), g=_decay(g, settings))


def comba_rule(q: Tensor, k: Tensor, v: Tensor, p: Tensor, g: Tensor, beta: Tensor, **options: Any) -> Result:
    """Compute the rule that erases by p, as fla's layers call it."""
    return call(delta_rule, CallOptions.read(options), q=q, k=k, v=v, beta=beta, g=g, erase=p)


def spread(x: Tensor, updates: int, place: int) -> Tensor:
    """Spread [B, T, ...] to [B, n T, ...], with zeros at all updates of a token but one."""
    steps = x.new_zeros(*x.shape[:2], updates, *x.shape[2:])
    steps[:, :, place] = x
    return steps.flatten(1, 2)


def delta_product(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, num_householder: int, **options: Any
) -> Result:
    """Compute the gated delta product as fla's layers call it, with n = `num_householder`."""
    settings = CallOptions.read(options)
    if settings.cu_seqlens is not None:
        settings = replace(settings, cu_seqlens=settings.cu_seqlens * num_householder)
    decay = None if g is None else spread(g, num_householder, 0)
    o, state = call(delta_rule, settings, q=spread(q, num_householder, -1), k=k, v=v, beta=beta, g=decay)
    return o.unflatten(1, (-1, num_householder))[:, :, -1], state


def _beyond_triton(*args: Any, g: Tensor | None = None, **kwargs: Any) -> bool:
    """Return whether fla's kernel cannot run: in float32, or for a backward pass where that of the gated rule fails."""
    return too_precise_for_triton(*args, **kwargs) or (g is not None and needs_torch_gated_rule(*args, g=g, **kwargs))


def stock_gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, chunk_size: int = 64, **options: Any
) -> Result:
    """Compute the rule with a decay, as the layers of transformers call it; their `chunk_size` is for GPUs."""
    return call(delta_rule, CallOptions.read(options), q=query, k=key, v=value, beta=beta, g=g)


def _decay(g: Tensor | None, options: CallOptions) -> Tensor | None:
    """Return the logarithm of the decay, which some layers leave to the kernel to compute."""
    if not options.use_gate_in_kernel:
        return g
    assert g is not None
    assert options.A_log is not None
    biased = wide(g) if options.dt_bias is None else wide(g) + wide(options.dt_bias).view(g.shape[2:])
    rate = wide(options.A_log).exp()
    rate = rate.unsqueeze(-1) if g.ndim == 4 else rate
    if options.lower_bound is None:
        return -rate * F.softplus(biased)
    return options.lower_bound * (rate * biased).sigmoid()


PATCHES = (
    Patch("fla.layers.delta_net.chunk_delta_rule", plain_delta_rule, too_precise_for_triton),
    Patch("fla.layers.delta_net.fused_recurrent_delta_rule", plain_delta_rule),
    Backend(
        "fla.ops.gated_delta_rule.chunk_gated_delta_rule", gated_delta_rule, needs_torch_gated_rule, "gated_delta_rule"
    ),
    Patch("fla.layers.gated_deltanet.fused_recurrent_gated_delta_rule", gated_delta_rule),
    Patch("fla.layers.gated_deltaproduct.fused_recurrent_gated_delta_rule", gated_delta_rule),
    Patch("fla.layers.gated_deltaproduct.chunk_gated_delta_product", delta_product, _beyond_triton),
    *in_place_of("fla.layers.kda", ("chunk_kda", "fused_recurrent_kda"), gated_delta_rule),
    *in_place_of("fla.layers.comba", ("chunk_comba", "fused_recurrent_comba"), comba_rule, needs_torch_gated_rule),
)

IN_TRANSFORMERS = (
    Patch("torch_chunk_gated_delta_rule", stock_gated_delta_rule, needs_torch_gated_rule),
    Patch("chunk_kimi_delta_attention", stock_gated_delta_rule),
)
