"""What is trained is the mixers, all of them and nothing else; afterwards it is in the stock model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tiny
from recoveries import PAPER, gradients, logits, perturb
from slimstate.checkpoints.reader import described_mixers
from slimstate.records.training import AdaptationSettings
from slimstate.system.errors import PlanError
from slimstate.training.adaptation import ALL_LINEAR, Adaptation, trainable
from slimstate.training.options import AdaptationOptions

SOME = (
    "delta_net-gate", "delta_net-no-conv", "delta_net-tied", "delta_net-hybrid", "gated_deltanet-grouped-values",
    "gated_deltanet-no-conv", "gated_deltanet-tied", "gated_deltanet-hybrid",
)  # fmt: skip
# more targets than PEFT lists one by one
LONG = {"attn": {**tiny.WITH_SOFTMAX, "layers": [1, 4]}, "num_hidden_layers": 7}


def build(name: str, **changes) -> nn.Module:
    return tiny.build(tiny.VARIANTS[name], **changes)


def adaptation(model, **options) -> Adaptation:
    config = model.config.to_dict()
    return Adaptation.of(config, described_mixers(config), AdaptationOptions(**options))


def modules_trained(adapted) -> tuple[set[str], set[str]]:
    """Return the stock names of the modules with an adapter, and of those trained whole."""
    names = [name.removeprefix("base_model.model.") for name in trainable(adapted)]
    low_rank = {name.partition(".lora_")[0] for name in names if ".lora_" in name}
    return low_rank, {name.partition(".modules_to_save.")[0] for name in names if ".lora_" not in name}


def idle(adapted) -> list[str]:
    """Return the trained parameters without a gradient."""
    return [name for name, gradient in gradients(adapted).items() if gradient is None or not gradient.any()]


def norms_and_biases(model) -> set[str]:
    """Return the names of the parameters that are vectors, except decay rates."""
    vectors = {name for name, parameter in model.named_parameters() if parameter.ndim == 1}
    return {name for name in vectors if not name.endswith(("A_log", ".D"))}


@pytest.mark.parametrize("name", sorted(name for name in tiny.VARIANTS if "delta_net-" in name or "deltanet-" in name))
def test_the_linear_layers_and_convolutions_of_the_mixers_are_trained(name):
    from fla.layers import DeltaNet, GatedDeltaNet
    from fla.modules import ShortConvolution

    model = build(name)
    mixers = {path: layer for path, layer in model.named_modules() if isinstance(layer, (DeltaNet, GatedDeltaNet))}
    selected = adaptation(model)
    assert sorted(selected.targets) == sorted(
        f"{path}.{part}"
        for path, layer in mixers.items()
        for part, inner in layer.named_modules()
        if isinstance(inner, nn.Linear)
    )
    convolutions = [path for path, part in model.named_modules() if isinstance(part, ShortConvolution)]
    assert sorted(selected.convolutions) == sorted(convolutions)


@pytest.mark.parametrize("name", SOME)
def test_attaching_adapters_changes_no_logit(name):
    model = build(name)
    before = logits(model)
    torch.testing.assert_close(logits(adaptation(model).attach(model)), before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("targets", [None, ALL_LINEAR])
@pytest.mark.parametrize("name", [*SOME, "delta_net-powlu", "delta_net-residuals", "delta_net-unfused"])
def test_all_adapters_and_convolutions_learn_and_nothing_else(name, targets):
    model = build(name)
    selected = adaptation(model, lora_targets=targets)
    adapted = selected.attach(model)
    assert modules_trained(adapted) == ({*selected.targets}, {*selected.convolutions})
    assert "lm_head" not in selected.targets
    perturb(adapted)  # at first B is zero, and A has no gradient
    assert idle(adapted) == []
    assert all(p.grad is None for p in adapted.parameters() if not p.requires_grad)


@pytest.mark.parametrize("name", SOME)
def test_norms_and_biases_of_the_whole_model_learn_where_they_are_unfrozen(name):
    model = build(name)
    vectors = norms_and_biases(model)
    assert any(vector.endswith("dt_bias") for vector in vectors) == name.startswith("gated")
    selected = adaptation(model, **PAPER)
    assert {path.rpartition(".")[2] for path in selected.targets} == {"q_proj", "k_proj", "v_proj"}
    assert vectors <= {*selected.weights(model.config.to_dict())}
    adapted = selected.attach(model)
    perturb(adapted)
    assert idle(adapted) == []
    whole = {part.removeprefix("base_model.model.") for part in trainable(adapted) if "lora_" not in part}
    stock = {part.replace(".modules_to_save.default", "") for part in whole if "conv1d" not in part}
    assert stock == vectors


SMALL = {"lora_rank": 3, "lora_alpha": 5}
MERGED = [(name, SMALL) for name in SOME] + [("delta_net-plain", {"lora_targets": ALL_LINEAR})]
UNFROZEN = ("norms", "biases", "norms, biases")
MERGED += [(name, {**PAPER, "unfreeze": kinds}) for name in (*SOME, "delta_net-plain") for kinds in UNFROZEN]
MERGED += [(name, {"full": True}) for name in ("delta_net-plain", "delta_net-tied", "gated_deltanet-hybrid")]


@pytest.mark.parametrize(("name", "options"), MERGED, ids=str)
def test_the_merged_weights_and_the_stored_adapter_are_the_trained_model(name, options, tmp_path):
    from peft import PeftModel

    model = build(name).requires_grad_(False)
    selected = adaptation(model, **options)
    adapted = selected.attach(model)
    before = logits(adapted)
    parameters = perturb(adapted)
    expected = logits(adapted)
    assert (expected - before).abs().max() > 0.1
    weights = selected.merge(build(name), parameters, tmp_path / "adapter")
    stock = build(name)
    original = {part: parameter.clone() for part, parameter in stock.named_parameters()}
    assert not stock.load_state_dict(weights, strict=False).unexpected_keys
    changed = {part for part, parameter in stock.named_parameters() if not torch.equal(parameter, original[part])}
    assert changed == {*selected.weights(stock.config.to_dict())}
    kinds = [kind.strip() for kind in options.get("unfreeze", "").split(",")]
    endings = [ending for kind, ending in (("norms", "norm"), ("biases", "bias")) if kind in kinds]
    if "full" not in options:
        vectors = {part for part in norms_and_biases(stock) if any(ending in part for ending in endings)}
        assert {part for part in changed if original[part].ndim == 1} == vectors
    tolerance = 0 if selected.full else 1e-4
    torch.testing.assert_close(logits(stock), expected, rtol=tolerance, atol=tolerance)
    if selected.has_adapters and ALL_LINEAR not in options.values():  # a fused MLP reads past its adapters
        loaded = PeftModel.from_pretrained(build(name), tmp_path / "adapter")
        torch.testing.assert_close(logits(loaded), expected, rtol=1e-4, atol=1e-4)


def test_trained_parameters_must_be_in_the_model():
    model = build("delta_net-plain")
    selected = adaptation(model)
    parameters = perturb(selected.attach(model))
    missing = next(iter(parameters))
    del parameters[missing]
    with pytest.raises(AssertionError, match=missing):
        selected.merge(build("delta_net-plain"), parameters)


@pytest.mark.parametrize("name", ["delta_net-hybrid", "gated_deltanet-hybrid"])
def test_softmax_layers_are_not_trained(name):
    model = build(name, **LONG)
    selected = adaptation(model)
    assert modules_trained(selected.attach(model)) == ({*selected.targets}, {*selected.convolutions})
    assert {part.split(".")[2] for part in selected.targets} == {"0", "2", "3", "5", "6"}


def test_full_training_trains_every_parameter():
    model = build("delta_net-plain").requires_grad_(False)
    selected = adaptation(model, full=True)
    assert (selected.targets, selected.convolutions, selected.describe()) == ((), (), AdaptationSettings(full=True))
    adapted = selected.attach(model)
    assert trainable(adapted).keys() == dict(model.named_parameters()).keys()
    assert None not in gradients(adapted).values()


@pytest.mark.parametrize("name", ["delta_net-hybrid", "gated_deltanet-tied"])
@pytest.mark.parametrize("targets", ["q_proj", "attn.q_proj", "down_proj", "k_proj, mlp.up_proj", ALL_LINEAR])
def test_targets_are_endings_of_the_names_of_linear_layers(name, targets):
    model = build(name)
    linear = [path.split(".") for path, part in model.named_modules() if isinstance(part, nn.Linear)]
    endings = [ending.strip().split(".") for ending in targets.split(",")]
    expected = {
        ".".join(path)
        for path in linear
        if path != ["lm_head"] and (targets == ALL_LINEAR or any(path[-len(end) :] == end for end in endings))
    }
    selected = adaptation(model, lora_targets=targets)
    assert {*selected.targets} == expected != set()
    assert len(selected.targets) == len(expected)
    assert selected.convolutions == adaptation(model).convolutions
    assert modules_trained(selected.attach(model))[0] == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora_targets": "x_proj"}, "x_proj matches no linear layer; there are q_proj, .*down_proj, all-linear"),
        ({"lora_targets": "q_proj,x_proj"}, "`lora_targets` x_proj matches"),
        ({"lora_targets": "proj"}, "`lora_targets` proj matches"),  # only whole names
        ({"lora_targets": "layers.0.attn"}, "`lora_targets` layers.0.attn matches"),
        ({"lora_targets": "q_conv1d"}, "`lora_targets` q_conv1d matches"),
        ({"lora_targets": "embeddings"}, "`lora_targets` embeddings matches"),
        ({"lora_targets": "lm_head"}, "`lora_targets` lm_head matches"),
        ({"lora_targets": "res_proj"}, "`lora_targets` res_proj matches"),  # fla only reads its weight
        ({"lora_targets": " , "}, "`lora_targets` must name at least one linear layer"),
        ({"full": True, "lora_targets": "q_proj"}, "leave out `lora_targets`"),
        ({"full": True, "unfreeze": "norms"}, "leave out `lora_targets` and `unfreeze`"),
        ({"unfreeze": "norm"}, "`unfreeze` must be norms or biases, or both, got 'norm'"),
        ({"unfreeze": " ,"}, "`unfreeze` must be norms or biases"),
        ({"lora_rank": 0}, "`lora_rank` must be at least 1, got 0"),
        ({"lora_alpha": 0}, "`lora_alpha` must be at least 1, got 0"),
    ],
)
def test_options_that_select_nothing_are_refused(options, message):
    with pytest.raises(PlanError, match=message):
        adaptation(build("delta_net-residuals"), **options)


@pytest.mark.parametrize("options", [{"lora_targets": ALL_LINEAR}, PAPER, {"full": True}])
@pytest.mark.parametrize("name", ["delta_net-plain", "gated_deltanet-plain"])
def test_the_trained_parameters_of_a_bfloat16_model_are_float32(name, options):
    model = build(name).to(torch.bfloat16)
    adapted = adaptation(model, **options).attach(model)
    assert {parameter.dtype for parameter in trainable(adapted).values()} == {torch.float32}
    frozen = {parameter.dtype for parameter in adapted.parameters() if not parameter.requires_grad}
    assert frozen == (set() if "full" in options else {torch.bfloat16})
    perturb(adapted)
    with torch.autocast("cpu", torch.bfloat16):
        values = gradients(adapted).values()
    assert all(each.dtype == torch.float32 and each.isfinite().all() and each.any() for each in values)


def test_a_description_counts_modules_and_names_each_kind_once():
    assert adaptation(build("delta_net-gate"), lora_rank=4, lora_alpha=9).describe() == AdaptationSettings(
        full=False,
        lora_rank=4,
        lora_alpha=9,
        targets=("b_proj", "g_proj", "k_proj", "o_proj", "q_proj", "v_proj"),
        convolutions=("k_conv1d", "q_conv1d", "v_conv1d"),
        modules=12,
    )
