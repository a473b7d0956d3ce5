"""Gated linear attention of fla: its rule against fla's own."""

from __future__ import annotations

import torch

from slimstate.families import gla
from tiny_model import GROUPED, drawn, variants

VARIANTS = variants(
    "gla",
    {"expand_k": 0.75},
    {
        "plain": {},
        "grouped-keys": GROUPED,
        "conv": {"use_short_conv": True},
        "relu": {"feature_map": "relu", "use_output_gate": False},
        "sigmoid": {"feature_map": "sigmoid", "fuse_norm": False},
    },
)


def test_the_rule_is_that_of_fla():
    from fla.ops.gla.naive import naive_recurrent_gla

    x, decay = drawn(time=150, heads=4), -torch.rand(1, 150, 4, 5)
    expected, state = naive_recurrent_gla(x["q"], x["k"], x["v"], decay, output_final_state=True)
    found, final = gla.gated_linear_attention(x["q"], x["k"], x["v"], gk=decay, output_final_state=True)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(final, state, rtol=1e-4, atol=1e-4)
