"""Comba of fla: its rule against fla's own."""

from __future__ import annotations

import torch

from slimstate.families import comba
from tiny_model import BY_HEAD_DIM, drawn, variants

VARIANTS = variants("comba", BY_HEAD_DIM, {"plain": {}, "grouped-values": {"num_v_heads": 4, "use_output_gate": False}})


def test_the_rule_is_that_of_fla():
    from fla.ops.comba.naive import naive_recurrent_comba

    x = drawn(time=150, heads=4)
    p = x["k"] * 0.3
    expected, state = naive_recurrent_comba(**x, p=p, output_final_state=True)
    found, final = comba.comba_rule(**x, p=p, output_final_state=True)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(final, state, rtol=1e-3, atol=1e-3)
