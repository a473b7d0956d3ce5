"""What runs in place of fla's functions is found by itself, covers what layers call, and knows when to stand aside."""

import inspect

import pytest
import torch
from transformers import DynamicCache
from transformers.models.bamba.modeling_bamba import BambaRMSNormGated

from slimstate.families import FAMILIES
from slimstate.kernels import gated_gradient, patches
from slimstate.system.errors import ModelError
from tiny import VARIANTS, build

OF_FLA = [name for name, family in FAMILIES.items() if family.library == "fla"]
PLACES = ["fla.layers.comba.chunk_comba", "fla.layers.gated_deltaproduct.chunk_gated_delta_product"]


def patch_of(place: str) -> patches.Patch:
    (patch,) = (patch for patch in patches.patches() if patch.place == place)
    return patch


@pytest.mark.parametrize("model_type", OF_FLA)
def test_every_function_that_a_layer_of_fla_calls_has_a_form_in_pytorch(model_type):
    """With the arguments in which queries and keys are seen: those may be given by position."""
    hook = FAMILIES[model_type].hook
    for operator in hook.operators:
        backends = {patch.name: patch for patch in patches.patches() if isinstance(patch, patches.Backend)}
        patch = backends.get(operator) or patch_of(f"{hook.module}.{operator}")
        assert {hook.query, hook.key, *hook.key_like} <= inspect.signature(patch.version).parameters.keys()


def test_a_patch_runs_on_a_cpu_and_leaves_other_devices_to_the_library(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "library_of_a_test.py").write_text("def forget(x):\n    return None\n")
    patch = patches.Patch("library_of_a_test.forget", lambda x: x + 1)
    patch.install()
    assert patch.owner.forget(torch.zeros(1)) == 1
    assert patch.owner.forget(torch.zeros(1, device="meta")) is None


def test_a_gated_norm_saves_only_its_inputs_and_has_the_same_gradient():
    patches.use_reference(FAMILIES["bamba"].hook)
    norm, forward, results, saved = BambaRMSNormGated(8, 4), BambaRMSNormGated.forward, [], []
    x, gate = (torch.randn(2, 5, 8, requires_grad=True) for _ in range(2))
    for compute in (inspect.unwrap(forward), forward):
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda x: x):
            y = compute(norm, x, gate)
        results.append([y, *torch.autograd.grad(y.sin().sum(), (x, gate, norm.weight))])
    assert {tensor.data_ptr() for tensor in saved} <= {x.data_ptr(), gate.data_ptr()}
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


def test_a_layer_that_is_recomputed_saves_only_its_input_and_has_the_same_gradient():
    model, family = build(VARIANTS["falcon_h1-plain"]).train(), FAMILIES["falcon_h1"]
    (mixer,) = family.mixers(model.config.to_dict())[:1]
    assert family.hook.recomputed
    assert patches._layers_that_call(family.hook) == [type(model.get_submodule(mixer.path))]
    layer, x = model.get_submodule(mixer.path), torch.randn(2, 70, mixer.input_size, requires_grad=True)
    weights, results, saved, sizes = list(layer.parameters()), [], [], []
    for forward in (type(layer).forward, patches.recomputed(inspect.unwrap(type(layer).forward), is_random=True)):
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            y = forward(layer, hidden_states=x)
        of_weights = {weight.data_ptr() for weight in weights}
        sizes.append(sum(t.numel() for t in saved if t.data_ptr() not in of_weights))
        results.append([y, *torch.autograd.grad(y.sin().sum(), (x, *weights), allow_unused=True)])
    assert sizes[1] <= x.numel() < sizes[0]
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["bamba", "qwen3_next"])
def test_packed_sequences_are_refused_where_the_convolution_would_mix_them(name):
    model = build(VARIANTS[f"{name}-plain"])
    mixer = FAMILIES[name].mixers(model.config.to_dict())[0]
    borders = {"seq_idx": torch.tensor([[0] * 4 + [1] * 4]), "cu_seq_lens_q": torch.tensor([0, 4, 8])}
    with pytest.raises(ModelError, match="packed sequences"):
        model.get_submodule(mixer.path)(torch.randn(1, 8, mixer.input_size), **borders)


def test_layers_are_recomputed_in_training_on_a_gpu_without_a_cache():
    layer, x = torch.nn.Linear(2, 2), torch.empty(1, 2, device="meta")
    assert patches.trains_on_gpu(layer, hidden_states=x, cache_params=None)
    assert not patches.trains_on_gpu(layer, hidden_states=x, cache_params=DynamicCache())
    assert not patches.trains_on_gpu(layer, hidden_states=torch.empty(1, 2))
    with torch.no_grad():
        assert not patches.trains_on_gpu(layer, hidden_states=x)
    assert not patches.trains_on_gpu(layer.eval(), hidden_states=x)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("refused", [True, False])
def test_on_a_gpu_pytorch_takes_the_gated_rules_whose_backward_fla_refuses_in_float32(place, refused, monkeypatch):
    """In half precision fla's kernels run, with a step of our own in place of the one that is refused."""
    monkeypatch.setattr(patches, "gated_backward_refused", lambda: refused)
    monkeypatch.setattr(patches, "has_fla", lambda: True)
    when = patch_of(place).when
    plain = {name: torch.empty(1, device="meta", dtype=torch.bfloat16) for name in ("q", "k", "g")}
    assert not when(**{name: value.clone().requires_grad_() for name, value in plain.items()})
    assert not when(**plain)
    if place.endswith("comba"):
        precise = {name: value.float().requires_grad_() for name, value in plain.items()}
        assert when(**precise) is refused
        with torch.no_grad():
            assert not when(**precise)


@pytest.mark.parametrize("refused", [True, False])
def test_our_step_of_a_backward_pass_runs_where_fla_refuses_its_own(refused, monkeypatch):
    monkeypatch.setattr(gated_gradient, "gated_backward_refused", lambda: refused)
    when = patch_of("fla.ops.common.chunk_o.chunk_bwd_dqkwg").when
    assert when(q=torch.empty(1), g=torch.empty(1)) is refused
    assert not when(q=torch.empty(1), g=None)


def test_on_a_gpu_a_product_without_a_gate_stays_with_fla_unless_it_is_too_precise(monkeypatch):
    monkeypatch.setattr(patches, "gated_backward_refused", lambda: True)
    monkeypatch.setattr(patches, "has_fla", lambda: True)
    when = patch_of("fla.layers.gated_deltaproduct.chunk_gated_delta_product").when
    query = torch.empty(1, device="meta", dtype=torch.bfloat16, requires_grad=True)
    assert not when(q=query, g=None)
    assert when(q=query.float(), g=None)
