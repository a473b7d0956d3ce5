"""Linear attention of fla: its rule, and the feature maps that cannot be cut."""

from __future__ import annotations

import pytest
import torch

from slimstate.families import family_of, linear_attn
from slimstate.system.errors import ModelError
from tiny_model import GROUPED, drawn, variants

VARIANTS = variants(
    "linear_attn",
    {"expand_k": 0.75, "feature_map": "relu"},
    {
        "plain": {},
        "grouped-keys": GROUPED,
        "elu": {"feature_map": "elu"},
        "normalised": {"norm_feature_map": True, "feature_map": "elu"},
    },
)


@pytest.mark.parametrize("normalize", [True, False])
def test_linear_attention_is_masked_attention_without_a_softmax_and_goes_on_from_its_state(normalize):
    x = drawn(time=150, heads=4)
    q, k, v = x["q"].abs(), x["k"].abs(), x["v"]
    weights = torch.einsum("bthk,bshk->bhts", q, k).tril() * 5**-0.5
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    expected = torch.einsum("bhts,bshv->bthv", weights, v)
    options = {"normalize": normalize, "output_final_state": True}
    found, _ = linear_attn.linear_attention(q, k, v, **options)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    _, state = linear_attn.linear_attention(q[:, :70], k[:, :70], v[:, :70], **options)
    rest, _ = linear_attn.linear_attention(q[:, 70:], k[:, 70:], v[:, 70:], initial_state=state, **options)
    torch.testing.assert_close(rest, expected[:, 70:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("feature_map", [None, "hedgehog", "t2r", "dpfp", "elementwise_product"])
def test_feature_maps_that_mix_channels_are_refused(feature_map):
    config = {"model_type": "linear_attn"} | ({} if feature_map is None else {"feature_map": feature_map})
    with pytest.raises(ModelError, match="mixes the channels"):
        family_of(config)
