"""RWKV-6 of fla: its rule against fla's own, packed sequences, and the parameters that start as zeros."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from slimstate.core.plan import Selection
from slimstate.core.surgery import cut
from slimstate.families import rwkv6
from slimstate.models.hooks import masked
from tiny_model import WITH_SOFTMAX, build, drawn, token_ids, variants

VARIANTS = variants(
    "rwkv6",
    {"expand_k": 0.75, "proj_low_rank_dim": 8, "gate_low_rank_dim": 8},
    {
        "plain": {},
        "wide-keys": {"expand_k": 1.0, "expand_v": 0.5},
        "unfused": {"fuse_norm": False, "fuse_cross_entropy": False, "norm_first": False},
        "no-norm-bias": {"norm_bias": False, "tie_word_embeddings": True},
        "hybrid": {"attn": WITH_SOFTMAX, "num_hidden_layers": 3},
    },
)


def arguments(time: int) -> dict[str, torch.Tensor]:
    x = drawn(time=time, heads=4, g="channel")
    return {"r": x["q"], "k": x["k"], "v": x["v"], "w": -x["g"].exp(), "u": torch.randn(4, 5)}


@pytest.mark.parametrize("start", [False, True])
def test_the_rule_is_that_of_fla(start):
    from fla.ops.rwkv6.recurrent_naive import naive_recurrent_rwkv6

    x, state = arguments(40), torch.randn(1, 4, 5, 3) if start else None
    by_head = [x[name].transpose(1, 2) for name in "rkvw"]
    expected, final = naive_recurrent_rwkv6(*by_head, x["u"], 0.7, state, output_final_state=True)
    found, end = rwkv6.rwkv6_rule(**x, scale=0.7, initial_state=state, output_final_state=True)
    torch.testing.assert_close(found, expected.transpose(1, 2), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(end, final, rtol=1e-4, atol=1e-4)


def test_packed_sequences_are_each_by_itself():
    x, ends = arguments(20), [0, 7, 8, 20]
    found, states = rwkv6.rwkv6_rule(**x, cu_seqlens=torch.tensor(ends), output_final_state=True)
    shifted = rwkv6.token_shift(x["v"].flatten(2), torch.tensor(ends))
    for n, (a, b) in enumerate(pairwise(ends)):
        piece = {name: tensor if name == "u" else tensor[:, a:b] for name, tensor in x.items()}
        alone, state = rwkv6.rwkv6_rule(**piece, output_final_state=True)
        torch.testing.assert_close(found[:, a:b], alone)
        torch.testing.assert_close(states[n : n + 1], state)
        torch.testing.assert_close(shifted[:, a:b], rwkv6.token_shift(x["v"].flatten(2)[:, a:b]))


def test_the_norms_and_the_activation_are_those_of_torch():
    x, residual, weight, bias = torch.randn(2, 3, 8), torch.randn(2, 3, 8), torch.randn(8), torch.randn(8)
    found, total = rwkv6.group_norm(x, weight, bias, residual, prenorm=True, num_groups=4)
    expected = nn.functional.group_norm((x + residual).flatten(0, 1), 4, weight, bias).view_as(x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(total, x + residual)
    point = torch.randn(9, requires_grad=True)
    (slope,) = torch.autograd.grad(rwkv6.squared_relu(point).sum(), point)
    torch.testing.assert_close(rwkv6.squared_relu_backward(torch.ones(9), point.detach()), slope)


def test_bonuses_and_biases_are_cut_with_their_channels():
    """A model that was not trained has zeros there, whatever rows of them are kept."""
    model, ids = build(VARIANTS[0]), token_ids()
    for name, parameter in model.named_parameters():
        if name.endswith(("bonus", "lora.2.bias", "x_bias")):
            nn.init.normal_(parameter)
    config = model.config.to_dict()
    mixers = rwkv6.mixers(config)
    keep = {mixer.layer: Selection(keep=torch.tensor([[0, 3, 9, 22], [1, 2, 11, 17]])) for mixer in mixers}
    changes = {"expand_k": rwkv6.resize(config, 4)["expand_k"]}
    small = build(VARIANTS[0], **changes)
    small.load_state_dict(cut(model.state_dict(), mixers, keep))
    with torch.inference_mode():
        with masked(model, mixers, keep):
            expected = model(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(small(input_ids=ids, use_cache=False).logits, expected, rtol=1e-4, atol=1e-4)
        assert (model(input_ids=ids, use_cache=False).logits - expected).abs().max() > 1e-2
