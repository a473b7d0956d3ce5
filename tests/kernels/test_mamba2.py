"""The scan of Mamba-2 and the gated rule of transformers' hybrids against what transformers has for them."""

from __future__ import annotations

import inspect

import pytest
import torch

from slimstate.families import FAMILIES
from slimstate.kernels.delta_rule import stock_gated_delta_rule
from slimstate.kernels.mamba2 import state_space_scan
from slimstate.kernels.patches import in_transformers


@pytest.mark.parametrize("started", [False, True])
def test_the_scan_is_that_of_transformers(started):
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    torch.manual_seed(0)
    x, dt, keys, queries = (torch.randn(2, 75, *shape) for shape in ((4, 6), (4,), (2, 5), (2, 5)))
    rate, skip, bias = -torch.rand(4) * 8, torch.randn(4), torch.randn(4)
    given = [each.requires_grad_() for each in (x, dt, rate, keys, queries, skip)]
    options = {"dt_bias": bias, "dt_softplus": True, "dt_limit": (0.1, 2.0), "return_final_states": True}
    options["initial_states"] = torch.randn(2, 4, 6, 5) if started else None
    results = []
    for scan in (inspect.unwrap(mamba2_chunk_scan), state_space_scan):
        y, last = scan(x, dt, rate, keys, queries, 32, skip, **options)
        results.append([y, last, *torch.autograd.grad(y.square().sum() + last.sum(), given)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-4 * float(a.std()))


def test_the_gated_rule_is_that_of_transformers():
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    torch.manual_seed(0)
    given = [torch.randn(2, 75, 4, 6), torch.randn(2, 75, 4, 6), torch.randn(2, 75, 4, 5)]
    given = [each.requires_grad_() for each in (*given, -torch.rand(2, 75, 4), torch.rand(2, 75, 4))]
    options = {"use_qk_l2norm_in_kernel": True, "output_final_state": True, "initial_state": torch.randn(2, 4, 6, 5)}
    results = []
    for rule in (inspect.unwrap(torch_chunk_gated_delta_rule), stock_gated_delta_rule):
        o, last = rule(*given, chunk_size=16, **options)
        results.append([o, last, *torch.autograd.grad(o.square().sum() + last.sum(), given)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-4 * float(a.std()))


OF_TRANSFORMERS = [name for name, family in FAMILIES.items() if family.library == "transformers"]


@pytest.mark.parametrize("model_type", OF_TRANSFORMERS)
def test_every_family_of_transformers_has_its_queries_and_keys_where_our_form_takes_them(model_type):
    hook = FAMILIES[model_type].hook
    version = in_transformers()[hook.operators[0]]
    parameters = list(inspect.signature(version).parameters)
    assert {hook.query, hook.key, *hook.per_token} <= set(parameters)
