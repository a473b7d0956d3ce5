"""Weights that rest in the dtype of their files, and are float32 to all who compute with them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from slimstate.models.compact_weights import EXPERTS_AT_ONCE, CompactWeight

EXPERTS = 2 * EXPERTS_AT_ONCE + 1


@pytest.fixture
def kept() -> torch.Tensor:
    return torch.randn(EXPERTS, 24, 16, generator=torch.Generator().manual_seed(0)).bfloat16()


def held(weight: torch.Tensor) -> nn.Module:
    """A module that has the weight as a model has its own."""
    module = nn.Module()
    module.weight = nn.Parameter(torch.empty(weight.shape, device="meta"), requires_grad=False)
    module.load_state_dict({"weight": weight}, assign=True)
    return module.requires_grad_(False)


def product(kind: str, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if kind == "grouped":
        ends = torch.tensor([0, 3, 3, 10, 20, 21, 21, 30, *[35] * (EXPERTS - 8)], dtype=torch.int32)
        return F.grouped_mm(rows, weight.transpose(-2, -1), offs=ends)
    if kind == "one":
        return F.linear(rows, weight[2])
    return torch.einsum("ni,eoi->neo", rows, weight)


@pytest.mark.parametrize("kind", ["grouped", "one", "all"])
def test_products_and_gradients_are_those_of_a_copy_in_float32_to_the_last_bit(kind, kept):
    found = []
    for weight in (CompactWeight(kept), kept.float()):
        rows = torch.randn(35, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
        made = product(kind, rows, held(weight).weight)
        made.square().sum().backward()
        found.append((made.detach(), rows.grad))
    for rested, copied in zip(*found, strict=True):
        assert rested.dtype == torch.float32
        assert torch.equal(rested, copied)


def test_experts_are_in_float32_a_few_at_a_time_and_autograd_keeps_none_of_them(kept, monkeypatch):
    grown, saved = [], []
    grow = torch.Tensor.float
    monkeypatch.setattr(torch.Tensor, "float", lambda tensor: grown.append(tensor.numel()) or grow(tensor))
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda kept: kept):
        rows = torch.randn(35, 16, requires_grad=True)
        product("grouped", rows, held(CompactWeight(kept)).weight).square().sum().backward()
    assert len(grown) == 2 * 3  # there and back
    assert max(grown) == EXPERTS_AT_ONCE * kept[0].numel()
    assert {type(tensor) for tensor in saved if tensor.shape[0] == EXPERTS and tensor.dim() == 3} == {CompactWeight}


def test_a_weight_in_a_module_is_float32_by_name_and_shares_the_memory_it_rests_in(kept):
    weight = held(CompactWeight(kept)).weight
    assert weight.dtype == torch.float32
    assert weight.stored.data_ptr() == kept.data_ptr()
    assert torch.equal(weight + 0, kept.float())
