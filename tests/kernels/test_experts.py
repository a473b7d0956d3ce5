"""Experts follow autocast, as all other products do, and save only their inputs in training on a GPU."""

import pytest
import torch
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations
from transformers.integrations import moe

from slimstate.kernels import experts
from slimstate.kernels.experts import prepare_experts
from tiny import VARIANTS, build


@pytest.mark.parametrize(("columns", "dtype"), [(16, torch.bfloat16), (12, torch.float32)])
def test_experts_compute_in_the_dtype_of_autocast_where_rows_are_aligned(columns, dtype):
    prepare_experts()
    torch.manual_seed(0)
    rows, ends = torch.randn(10, 8), torch.tensor([4, 4, 10], dtype=torch.int32)
    weight = torch.randn(3, 8, columns, requires_grad=True)
    plain = torch.cat([rows[:4] @ weight[0], rows[4:] @ weight[2]])
    torch.testing.assert_close(moe._grouped_mm(rows, weight, ends), plain)
    with torch.autocast("cpu", torch.bfloat16):
        product = moe._grouped_mm(rows, weight, ends)
        expected = torch.cat([rows[:4] @ weight[0], rows[4:] @ weight[2]])
    assert product.dtype == dtype
    torch.testing.assert_close(product.float(), (expected if dtype == torch.bfloat16 else plain).float())
    product.float().square().sum().backward()
    assert weight.grad[0].any()
    assert not weight.grad[1].any()


def test_experts_with_adapters_that_are_gone_in_the_backward_pass_have_their_gradient(monkeypatch):
    monkeypatch.setattr(experts, "trains_on_gpu", lambda *_: True)
    model = build(VARIANTS["granitemoehybrid-plain"]).train()
    layer = next(module for name, module in model.named_modules() if name.endswith("moe.experts"))

    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(2.0))

        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * self.scale

    adapter = Scaled()
    register_parametrization(layer, "gate_up_proj", adapter, unsafe=True)
    y = layer(torch.randn(20, layer.hidden_dim), torch.zeros(20, 2, dtype=torch.long), torch.rand(20, 2))
    remove_parametrizations(layer, "gate_up_proj", leave_parametrized=False)  # as PEFT does after a forward pass
    y.sum().backward()
    assert adapter.scale.grad.abs() > 0


def test_training_on_a_gpu_saves_the_inputs_of_experts_and_has_the_same_gradient(monkeypatch):
    model = build(VARIANTS["granitemoehybrid-plain"]).train()
    layer = next(module for name, module in model.named_modules() if name.endswith("moe.experts"))
    x, weights = torch.randn(20, layer.hidden_dim, requires_grad=True), list(layer.parameters())
    choice, shares = torch.randint(layer.num_experts, (20, 2)), torch.rand(20, 2, requires_grad=True)
    results, saved, sizes = [], [], []
    for on_gpu in (False, True):
        monkeypatch.setattr(experts, "trains_on_gpu", lambda *_, answer=on_gpu: answer)
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            y = layer(x, choice, shares)
        of_weights = {weight.data_ptr() for weight in weights}
        sizes.append(sum(t.numel() for t in saved if t.data_ptr() not in of_weights))
        results.append([y, *torch.autograd.grad(y.sin().sum(), (x, shares, *weights))])
    assert sizes[1] <= x.numel() + choice.numel() + shares.numel() < sizes[0] / 3
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
