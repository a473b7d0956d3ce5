"""MesaNet of fla: one width for keys and values, and a second state."""

import pytest
import torch

import slimstate
from slimstate.kernels import mesa_net
from slimstate.system.errors import ModelError
from tiny_model import variants

VARIANTS = variants("mesa_net", {"head_dim": 24}, {"plain": {}, "gated": {"use_output_gate": True}})


def test_keys_and_values_are_cut_together(folders, tmp_path):
    record = slimstate.prune(folders["mesa_net-plain"], tmp_path / "cut", state_dim=12, method="random")
    assert (record.key_dim, record.value_dim) == (12, 12)
    assert record.state_bytes["after"]["fp32"] * 4 == record.state_bytes["before"]["fp32"]
    with pytest.raises(ModelError, match="one width for keys and values, got key dim 12 and value dim 8: use"):
        slimstate.prune(folders["mesa_net-plain"], key_dim=12, value_dim=8, method="random")


def test_a_query_reads_what_the_inverse_of_the_products_of_keys_makes_of_it():
    """Against the exact inverse, one token after the other; in several chunks, from a state, and step by step."""
    torch.manual_seed(0)
    q, k, v = (torch.nn.functional.normalize(torch.randn(2, 90, 3, 6), dim=-1) for _ in "qkv")
    g, beta = torch.rand(2, 90, 3).log(), torch.rand(2, 90, 3)
    lamb = torch.rand(3, 6) + 0.5
    keys, values, expected = torch.zeros(2, 3, 6, 6), torch.zeros(2, 3, 6, 6), []
    for t in range(90):
        fade, written = g[:, t].exp()[..., None, None], (beta[:, t, :, None] * k[:, t]).unsqueeze(-1)
        keys, values = keys * fade + written * k[:, t].unsqueeze(-2), values * fade + written * v[:, t].unsqueeze(-2)
        solved = torch.linalg.solve(keys + torch.diag_embed(lamb), q[:, t])
        expected.append(torch.einsum("bhk,bhkv->bhv", solved, values))
    first, *states = mesa_net.mesa_net(*(x[:, :80] for x in (q, k, v, g, beta)), lamb, output_final_state=True)
    outputs = [first]
    for t in range(80, 90):
        tensors = {name: x[:, t] for name, x in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta))}
        output, *states = mesa_net.one_step(**tensors, lamb=lamb, prev_h_kk=states[0], prev_h_kv=states[1])
        outputs.append(output.unsqueeze(1))
    torch.testing.assert_close(torch.cat(outputs, 1), torch.stack(expected, 1), rtol=1e-3, atol=3e-4)  # TINY is felt
    torch.testing.assert_close(tuple(states), (keys, values))
