"""The scan of Mamba-2 for GPUs against that by heads, what it saves, and the choice between kernels."""

import sys
import warnings

import pytest
import torch
import torch.nn.functional as F

from slimstate.kernels import patches, state_space
from slimstate.kernels.state_space import Inputs, by_fla, by_head, form_for, grouped

SCAN = "def mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, D, z, dt_bias, initial_states{}): ...\n"
REST = ", dt_softplus, dt_limit, return_final_states"
SOURCES = [
    (SCAN.format(REST), None),
    (SCAN.format(""), "argument dt_limit, dt_softplus"),
    ("import no_cuda\n", "no_cuda"),
]


def inputs(time: int, dtype: torch.dtype = torch.float64) -> Inputs:
    """Return four heads in two groups, with decays down to e^-50."""
    torch.manual_seed(time)
    x, keys, queries = (torch.randn(2, time, *shape) for shape in ((4, 3), (2, 5), (2, 5)))
    step = F.softplus(torch.randn(2, time, 4))
    tensors = x, step, -step * torch.tensor([0.1, 1, 10, 50]), keys, queries, torch.randn(4), torch.randn(2, 4, 3, 5)
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    kinds = (dtype, wide, wide, dtype, dtype, wide, wide)
    return Inputs(*(tensor.to(kind).requires_grad_() for tensor, kind in zip(tensors, kinds, strict=True)))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("time", [5, 150])
def test_groups_give_the_values_and_gradients_of_heads_as_precisely_as_their_inputs(time, dtype, tolerance):
    results, x = [], inputs(time, dtype)
    exact = Inputs(*(tensor.detach().double().requires_grad_() for tensor in x))
    for form, tensors in ((grouped, x), (by_head, exact)):
        y, last = form(tensors)
        loss = (y * torch.cos(torch.arange(y.numel())).view_as(y)).sum() + last.sin().sum()
        results.append((y, last, *torch.autograd.grad(loss, tensors)))
    for mine, theirs in zip(*results, strict=True):
        assert (mine - theirs).abs().max() <= tolerance * theirs.abs().max()


def test_memory_for_a_gradient_is_that_of_the_inputs_and_a_state():
    x, saved = inputs(500), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.nbytes), lambda tensor: tensor):
        grouped(x)
    assert sum(saved) == sum(tensor.nbytes for tensor in x)


@pytest.mark.parametrize("form", [by_head, grouped])
def test_packed_sequences_are_independent_and_a_gate_multiplies_the_outputs(form, monkeypatch):
    monkeypatch.setattr(state_space, "form_for", lambda _: form)
    x, dt, _, keys, queries, skip, _ = (tensor.detach() for tensor in inputs(30))
    z, rate = torch.randn_like(x), -torch.arange(1.0, 5, dtype=x.dtype)
    numbers = torch.tensor([0] * 7 + [1] + [2] * 22).expand(2, -1)
    y = state_space.state_space_scan(x, dt, rate, keys, queries, 8, skip, seq_idx=numbers, z=z)
    parts = [
        state_space.state_space_scan(*(each[:, a:b] for each in (x, dt)), rate, keys[:, a:b], queries[:, a:b], 8, skip)
        for a, b in ((0, 7), (7, 8), (8, 30))
    ]
    torch.testing.assert_close(y, torch.cat(parts, 1) * F.silu(z))


def test_on_a_gpu_fla_computes_half_precision_unless_channels_are_too_few_for_its_kernels(monkeypatch):
    monkeypatch.setattr(state_space, "has_fla", lambda: True)
    plain = Inputs(*(x.detach().to("meta") for x in inputs(5, dtype=torch.bfloat16)))
    assert form_for(plain) is grouped  # 5 channels
    plain = plain._replace(B=plain.B.new_empty(2, 5, 2, 64))
    trained = Inputs(*(x.clone().requires_grad_() for x in plain))
    assert form_for(trained) is grouped  # few values, and a gradient
    assert form_for(trained._replace(x=plain.x.new_empty(*plain.x.shape[:3], 64))) is state_space.by_fla_again
    assert form_for(plain) is by_fla
    assert form_for(Inputs(*(x.float() for x in plain))) is grouped
    assert form_for(plain.at(slice(1))) is by_head
    with patches.in_pytorch():
        assert form_for(plain) is grouped
    monkeypatch.setattr(state_space, "has_fla", lambda: False)
    assert form_for(plain) is grouped


@pytest.mark.parametrize("scan", [by_head, grouped, lambda tensors: state_space._scan(tensors, 64)])
def test_a_scan_that_is_computed_again_has_the_same_gradient(scan):
    runs, results = [], []

    def counted(tensors):
        runs.append(1)
        return scan(tensors)

    for form in (counted, patches.recomputed(counted)):
        tensors = Inputs(*(x.detach().requires_grad_() for x in inputs(70)))
        y, last = form(tensors)
        results.append([y, last, *torch.autograd.grad(y.square().sum() + last.sum(), tensors)])
    assert len(runs) == 3
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize(("source", "fault"), SOURCES)
def test_mamba_ssm_of_a_wrong_version_is_passed_over_with_one_line(source, fault, tmp_path, monkeypatch):
    folder = tmp_path / "mamba_ssm" / "ops" / "triton"
    folder.mkdir(parents=True)
    (folder / "ssd_combined.py").write_text(source)
    (tmp_path / "mamba_ssm" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    half = torch.empty(1, device="meta", dtype=torch.bfloat16)
    state_space.has_mamba_ssm.cache_clear()
    try:
        with warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter("always")
            assert [state_space.needs_our_scan(half), state_space.needs_our_scan(half)] == [fault is not None] * 2
            assert state_space.needs_our_scan(half.float())
    finally:
        state_space.has_mamba_ssm.cache_clear()
        for name in [name for name in sys.modules if name.startswith("mamba_ssm")]:
            del sys.modules[name]
    assert [fault in str(warning.message) for warning in shown] == ([] if fault is None else [True])
