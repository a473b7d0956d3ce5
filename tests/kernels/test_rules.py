"""Every rule against the slow form of its own library; packed sequences, shared key heads and states between calls."""

import inspect
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from recurrence_inputs import drawn, inputs
from slimstate.families import FAMILIES
from slimstate.kernels import delta_rule, gla
from slimstate.kernels.delta_rule import comba_rule, delta_product, gated_delta_rule
from slimstate.kernels.gla import gated_linear_attention, linear_attention
from slimstate.kernels.patches import in_transformers
from slimstate.kernels.rwkv6 import rwkv6_rule, token_shift
from slimstate.kernels.state_space import state_space_scan

Results = tuple[torch.Tensor, ...]
final = {"output_final_state": True}


def same(actual: Results, expected: Results, tolerance: float = 1e-4) -> None:
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance * max(1.0, float(theirs.std())))


def comba() -> tuple[Results, Results, float]:
    from fla.ops.comba.naive import naive_chunk_comba  # which agrees with fla's kernels; naive_recurrent_comba does not

    x = drawn(time=150, heads=4)
    return comba_rule(**x, p=0.3 * x["k"], **final), naive_chunk_comba(**x, p=0.3 * x["k"], **final), 1e-3


def product() -> tuple[Results, Results]:
    from fla.ops.gated_delta_product.naive import naive_recurrent_gated_delta_product

    x, many = drawn(heads=4), drawn(time=60, heads=4)
    updates = {"k": F.normalize(many["k"], dim=-1), "v": many["v"], "beta": many["beta"]}
    call = {"q": x["q"], **updates, "g": x["g"], "scale": 0.5, "num_householder": 3, **final}
    return delta_product(**call), naive_recurrent_gated_delta_product(**call)


def linear_gated() -> tuple[Results, Results]:
    from fla.ops.gla.naive import naive_recurrent_gla

    x, decay = drawn(time=150, heads=4), -torch.rand(1, 150, 4, 5)
    q, k, v = x["q"], x["k"], x["v"]
    return gated_linear_attention(q, k, v, gk=decay, **final), naive_recurrent_gla(q, k, v, decay, **final)


def kimi(lower_bound: float | None) -> tuple[Results, Results]:
    from fla.ops.kda.gate import naive_kda_gate, naive_kda_lowerbound_gate
    from fla.ops.kda.naive import naive_recurrent_kda

    x, rate, bias = drawn(g="channel"), torch.rand(4), torch.randn(20)
    options = {} if lower_bound is None else {"lower_bound": lower_bound}
    gate = (naive_kda_lowerbound_gate if options else naive_kda_gate)(x["g"], rate, bias, **options)
    actual = gated_delta_rule(**x, A_log=rate, dt_bias=bias, use_gate_in_kernel=True, **final, **options)
    return actual, naive_recurrent_kda(x["q"], x["k"], x["v"], gate, x["beta"], **final)


def kimi_with_equal_decays() -> tuple[Results, Results]:
    x, options = drawn(), {"use_qk_l2norm_in_kernel": True, **final}
    channels = {**x, "g": x["g"].unsqueeze(-1).expand(-1, -1, -1, 5)}
    return gated_delta_rule(**channels, **options), gated_delta_rule(**x, **options)


def rwkv(start: bool) -> tuple[Results, Results]:
    from fla.ops.rwkv6.recurrent_naive import naive_recurrent_rwkv6

    x, state = rwkv_arguments(40), torch.randn(1, 4, 5, 3) if start else None
    by_head = [x[name].transpose(1, 2) for name in "rkvw"]
    o, last = naive_recurrent_rwkv6(*by_head, x["u"], 0.7, state, **final)
    return rwkv6_rule(**x, scale=0.7, initial_state=state, **final), (o.transpose(1, 2), last)


def rwkv_arguments(time: int) -> dict[str, torch.Tensor]:
    x = drawn(time=time, heads=4, g="channel")
    return {"r": x["q"], "k": x["k"], "v": x["v"], "w": -x["g"].exp(), "u": torch.randn(4, 5)}


def attention_without_softmax(normalize: bool) -> tuple[Results, Results]:
    x = drawn(time=150, heads=4)
    q, k, v = x["q"].abs(), x["k"].abs(), x["v"]
    weights = torch.einsum("bthk,bshk->bhts", q, k).tril() * 5**-0.5
    weights = weights / weights.sum(-1, keepdim=True) if normalize else weights
    _, state = linear_attention(q[:, :70], k[:, :70], v[:, :70], normalize=normalize, **final)
    rest, _ = linear_attention(q[:, 70:], k[:, 70:], v[:, 70:], normalize=normalize, initial_state=state, **final)
    expected = torch.einsum("bhts,bshv->bthv", weights, v)
    return (linear_attention(q, k, v, normalize=normalize)[0], rest), (expected, expected[:, 70:])


def with_gradients(rules, arguments: list[torch.Tensor], **options) -> list[Results]:
    """Return the outputs, the last state and the gradients of each rule."""
    results = []
    for rule in rules:
        y, last = rule(*arguments, **options)
        results.append((y, last, *torch.autograd.grad(y.square().sum() + last.sum(), arguments)))
    return results


def scan_of_transformers(start: bool) -> list[Results]:
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    torch.manual_seed(0)
    x, dt, keys, queries = (torch.randn(2, 75, *shape) for shape in ((4, 6), (4,), (2, 5), (2, 5)))
    arguments = [each.requires_grad_() for each in (x, dt, -torch.rand(4) * 8, keys, queries, torch.randn(4))]
    options = {"dt_bias": torch.randn(4), "dt_softplus": True, "dt_limit": (0.1, 2.0), "return_final_states": True}
    options["initial_states"] = torch.randn(2, 4, 6, 5) if start else None
    scans = (state_space_scan, inspect.unwrap(mamba2_chunk_scan))
    rules = [lambda *xs, scan=scan, **more: scan(*xs[:5], 32, xs[5], **more) for scan in scans]
    return with_gradients(rules, arguments, **options)


def gated_rule_of_transformers() -> list[Results]:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    torch.manual_seed(0)
    arguments = [torch.randn(2, 75, 4, 6), torch.randn(2, 75, 4, 6), torch.randn(2, 75, 4, 5)]
    arguments = [each.requires_grad_() for each in (*arguments, -torch.rand(2, 75, 4), torch.rand(2, 75, 4))]
    options = {"use_qk_l2norm_in_kernel": True, "initial_state": torch.randn(2, 4, 6, 5), "chunk_size": 16, **final}
    rules = (delta_rule.stock_gated_delta_rule, inspect.unwrap(torch_chunk_gated_delta_rule))
    return with_gradients(rules, arguments, **options)


RULES = {
    "comba": comba,
    "delta product": product,
    "gla": linear_gated,
    "kda": partial(kimi, None),
    "kda with a bound": partial(kimi, -5.0),
    "kda with equal decays": kimi_with_equal_decays,
    "rwkv-6": partial(rwkv, False),
    "rwkv-6 from a state": partial(rwkv, True),
    "linear attention": partial(attention_without_softmax, False),
    "normalised linear attention": partial(attention_without_softmax, True),
    "mamba-2": partial(scan_of_transformers, False),
    "mamba-2 from a state": partial(scan_of_transformers, True),
    "gated delta rule of transformers": gated_rule_of_transformers,
}


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_that_of_its_library(name):
    same(*RULES[name]())


def test_a_step_of_comba_erases_from_the_state_before_its_decay():
    x = {name: tensor.double() for name, tensor in drawn(time=1, heads=4).items()}
    p, before = x["k"] * 0.3, torch.randn(1, 4, 5, 3, dtype=torch.float64)
    recalled = torch.einsum("bhkv,bthk->bthv", before, p)
    update = x["beta"].unsqueeze(-1) * (x["v"] - recalled)
    expected = before * x["g"][:, 0].exp()[..., None, None] + torch.einsum("bthk,bthv->bhkv", x["k"], update)
    actual = comba_rule(**x, p=p, scale=1.0, initial_state=before, **final)
    same(actual, (torch.einsum("bhkv,bthk->bthv", expected, x["q"]), expected), 1e-9)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("by_another", [False, True])
def test_both_forms_give_heads_that_share_a_key_head_the_gradients_of_copies(gated, by_another):
    (q, k, v, beta, *g), state = inputs(2, 70, 2, 3, 6, 5, gated)
    shared = [q, k, *([F.normalize(torch.randn_like(k), dim=-1).requires_grad_()] if by_another else [])]
    copies = [x.detach().repeat_interleave(3, 2).requires_grad_() for x in shared]
    results = []
    for form in (delta_rule.recurrence, delta_rule.chunked):
        for keys in (shared, copies):
            erase = keys[2] if by_another else None
            o, last = form(*keys[:2], v, beta, *g, scale=0.4, state=state, erase=erase)
            gradients = torch.autograd.grad(o.square().sum() + last.sum(), [*keys, v, beta, *g, state])
            summed = [x if keys is shared else x.unflatten(2, (2, 3)).sum(3) for x in gradients[: len(keys)]]
            results.append((o, last, *summed, *gradients[len(keys) :]))
    for other in results[1:]:
        same(other, results[0], 1e-9)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 90), st.integers(1, 89), st.booleans(), st.integers(1, 3), st.integers(0, 99))
def test_a_state_carries_a_sequence_across_any_cut(time, cut, gated, groups, seed):
    tensors, _ = inputs(1, time + cut, 2, groups, 4, 3, gated, seed)
    first, state = delta_rule.delta_rule(*(x[:, :cut] for x in tensors), scale=1.0)
    second, end = delta_rule.delta_rule(*(x[:, cut:] for x in tensors), scale=1.0, state=state)
    same((torch.cat([first, second], 1), end), delta_rule.delta_rule(*tensors, scale=1.0), 1e-10)


def test_packed_sequences_are_independent():
    ends = [0, 7, 8, 20]
    packed = {"cu_seqlens": torch.tensor(ends), **final}
    x, y = rwkv_arguments(20), drawn(time=20)
    o, states = rwkv6_rule(**x, **packed)
    shifted = token_shift(x["v"].flatten(2), torch.tensor(ends))
    y.pop("g")
    deltas, delta_states = delta_rule.plain_delta_rule(**y, use_qk_l2norm_in_kernel=True, **packed)
    q, k = (F.normalize(y[name], dim=-1) for name in "qk")
    for n, (a, b) in enumerate(pairwise(ends)):
        piece = {name: tensor if name == "u" else tensor[:, a:b] for name, tensor in x.items()}
        same((o[:, a:b], states[n : n + 1]), rwkv6_rule(**piece, **final))
        same((shifted[:, a:b],), (token_shift(x["v"].flatten(2)[:, a:b]),))
        alone = delta_rule.recurrence(*(z[:, a:b] for z in (q, k, y["v"], y["beta"])), scale=5**-0.5)
        same((deltas[:, a:b], delta_states[n : n + 1]), alone)


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_strong_decay_does_not_overflow(decay):
    (q, k, v, beta, g), _ = inputs(1, 100, 1, 1, 4, 4, True)
    g = torch.full_like(g if decay == "head" else k, -80.0)
    for erase in (None, k / 2) if decay == "head" else (None,):
        rules = [form(q, k, v, beta, g, scale=1.0, erase=erase) for form in (delta_rule.chunked, delta_rule.recurrence)]
        same(*rules, 1e-10)
    same(*(form(q, k, v, g, scale=1.0) for form in (gla.chunked, gla.recurrence)), 1e-10)


@pytest.mark.parametrize("model_type", [name for name, family in FAMILIES.items() if family.library == "transformers"])
def test_our_forms_have_the_arguments_that_families_of_transformers_name(model_type):
    hook = FAMILIES[model_type].hook
    parameters = set(inspect.signature(in_transformers()[hook.operators[0]].version).parameters)
    assert {hook.query, hook.key, *hook.per_token} <= parameters
