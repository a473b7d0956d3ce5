"""What is trained is the mixers, all of them and nothing else; what was trained is in the stock model afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tiny
from slimstate.checkpoints.reader import described_mixers
from slimstate.records.training import AdaptationSettings
from slimstate.system.errors import PlanError
from slimstate.training.adaptation import ALL_LINEAR, Adaptation, trainable

IDS = tiny.token_ids(2, 40)
SOME = (
    "delta_net-gate",
    "delta_net-no-conv",
    "delta_net-tied",
    "delta_net-hybrid",
    "gated_deltanet-grouped-values",
    "gated_deltanet-no-conv",
    "gated_deltanet-tied",
    "gated_deltanet-hybrid",
)
LONG = {
    "attn": {**tiny.WITH_SOFTMAX, "layers": [1, 4]},
    "num_hidden_layers": 7,
}  # more targets than PEFT lists one by one


def adaptation(model, chosen=None, **options) -> Adaptation:
    config = model.config.to_dict()
    return Adaptation.of(config, described_mixers(config), chosen, **options)


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def shaken(adapted, seed: int = 1) -> dict[str, torch.Tensor]:
    """Random changes to all that is trained; returns it."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trainable(adapted).values():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return {name: parameter.detach().clone() for name, parameter in trainable(adapted).items()}


def gradients(adapted) -> dict[str, torch.Tensor | None]:
    loss = adapted(input_ids=IDS, use_cache=False).logits.float().log_softmax(-1)[..., 0].mean()
    loss.backward()
    return {name: parameter.grad for name, parameter in trainable(adapted).items()}


def modules_trained(adapted) -> tuple[set[str], set[str]]:
    """The stock names of the modules with an adapter, and of those trained whole."""
    low_rank, whole = set(), set()
    for name in trainable(adapted):
        stock = name.removeprefix("base_model.model.")
        if ".lora_" in stock:
            low_rank.add(stock.partition(".lora_")[0])
        else:
            whole.add(stock.partition(".modules_to_save.")[0])
    return low_rank, whole


@pytest.mark.parametrize("name", sorted(name for name in tiny.VARIANTS if "delta_net-" in name or "deltanet-" in name))
def test_the_linear_maps_and_convolutions_of_the_mixers_are_trained(name):
    model = tiny.build(tiny.VARIANTS[name])
    from fla.layers import DeltaNet, GatedDeltaNet
    from fla.modules import ShortConvolution

    found = adaptation(model)
    assert sorted(found.targets) == sorted(
        f"{path}.{part}"
        for path, layer in model.named_modules()
        if isinstance(layer, (DeltaNet, GatedDeltaNet))
        for part, inner in layer.named_modules()
        if isinstance(inner, nn.Linear)
    )
    convolutions = [path for path, part in model.named_modules() if isinstance(part, ShortConvolution)]
    assert sorted(found.convolutions) == sorted(convolutions)


@pytest.mark.parametrize("name", SOME)
def test_attaching_changes_no_logit(name):
    model = tiny.build(tiny.VARIANTS[name])
    before = logits(model)
    torch.testing.assert_close(logits(adaptation(model).attach(model)), before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chosen", [None, ALL_LINEAR])
@pytest.mark.parametrize("name", [*SOME, "delta_net-powlu", "delta_net-residuals", "delta_net-unfused"])
def test_only_adapters_and_convolutions_learn_and_all_of_them_do(name, chosen):
    model = tiny.build(tiny.VARIANTS[name])
    wanted = adaptation(model, chosen)
    adapted = wanted.attach(model)
    assert modules_trained(adapted) == (set(wanted.targets), set(wanted.convolutions))
    shaken(adapted)  # at first B is zero, and A has no gradient
    found = gradients(adapted)
    assert [name for name, gradient in found.items() if gradient is None or not gradient.any()] == []
    assert all(p.grad is None for p in adapted.parameters() if not p.requires_grad)


PAPER = {"chosen": "q_proj,k_proj,v_proj", "unfreeze": "norms,biases"}


def norms_and_biases(model) -> set[str]:
    """The names of their parameters, told by the shapes: all that are vectors, but for those of decay rates."""
    vectors = {name for name, parameter in model.named_parameters() if parameter.ndim == 1}
    return {name for name in vectors if not name.endswith(("A_log", ".D"))}


@pytest.mark.parametrize("name", SOME)
def test_norms_and_biases_of_the_whole_model_learn_where_they_are_unfrozen(name):
    model = tiny.build(tiny.VARIANTS[name])
    vectors = norms_and_biases(model)
    assert any(vector.endswith("dt_bias") for vector in vectors) == name.startswith("gated")
    wanted = adaptation(model, **PAPER)
    assert {path.rpartition(".")[2] for path in wanted.targets} == {"q_proj", "k_proj", "v_proj"}
    whole = {vector for vector in wanted.weights(model.config.to_dict()) if vector in vectors}
    assert whole == vectors
    adapted = wanted.attach(model)
    shaken(adapted)
    found = gradients(adapted)
    assert [name for name, gradient in found.items() if gradient is None or not gradient.any()] == []
    stock = {name.removeprefix("base_model.model.").replace(".modules_to_save.default", "") for name in found}
    assert vectors <= stock
    assert {n for n in stock if "lora_" not in n and "conv1d" not in n} == vectors


@pytest.mark.parametrize("unfreeze", ["norms", "biases", "norms, biases"])
@pytest.mark.parametrize("name", [*SOME, "delta_net-plain"])
def test_what_is_unfrozen_is_merged_and_kept_with_the_adapter(name, unfreeze, tmp_path):
    model = tiny.build(tiny.VARIANTS[name])
    wanted = adaptation(model, **{**PAPER, "unfreeze": unfreeze})
    adapted = wanted.attach(model)
    trained = shaken(adapted)
    expected = logits(adapted)
    merged = wanted.merged(tiny.build(tiny.VARIANTS[name]), trained, tmp_path / "adapter")
    stock = tiny.build(tiny.VARIANTS[name])
    kinds = {"norms": "norm", "biases": "bias"}
    chosen = {n for n in norms_and_biases(stock) if any(kinds[kind.strip()] in n for kind in unfreeze.split(","))}
    before = {n: parameter.clone() for n, parameter in stock.named_parameters()}
    assert not stock.load_state_dict(merged, strict=False).unexpected_keys
    changed = {n for n, parameter in stock.named_parameters() if not torch.equal(parameter, before[n])}
    assert changed == {*wanted.weights(stock.config.to_dict())}
    assert {n for n in changed if before[n].ndim == 1} == chosen
    torch.testing.assert_close(logits(stock), expected, rtol=1e-4, atol=1e-4)

    from peft import PeftModel

    kept = PeftModel.from_pretrained(tiny.build(tiny.VARIANTS[name]), tmp_path / "adapter")
    torch.testing.assert_close(logits(kept), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["delta_net-hybrid", "gated_deltanet-hybrid"])
def test_of_many_layers_the_softmax_ones_stay_as_they_are(name):
    model = tiny.build(tiny.VARIANTS[name], **LONG)
    wanted = adaptation(model)
    adapted = wanted.attach(model)
    assert modules_trained(adapted) == (set(wanted.targets), set(wanted.convolutions))
    assert {name.split(".")[2] for name in wanted.targets} == {"0", "2", "3", "5", "6"}


@pytest.mark.parametrize("name", SOME)
def test_what_is_merged_is_the_adapted_model(name, tmp_path):
    model = tiny.build(tiny.VARIANTS[name])
    wanted = adaptation(model, rank=3, alpha=5)
    adapted = wanted.attach(model)
    before = logits(adapted)
    trained = shaken(adapted)
    expected = logits(adapted)
    assert (expected - before).abs().max() > 0.1

    merged = wanted.merged(tiny.build(tiny.VARIANTS[name]), trained, tmp_path / "adapter")
    stock = tiny.build(tiny.VARIANTS[name])
    parts = {*wanted.targets, *wanted.convolutions}
    assert merged.keys() == {tensor for tensor in stock.state_dict() if tensor.rpartition(".")[0] in parts}
    assert not stock.load_state_dict(merged, strict=False).unexpected_keys
    torch.testing.assert_close(logits(stock), expected, rtol=1e-4, atol=1e-4)

    from peft import PeftModel

    kept = PeftModel.from_pretrained(tiny.build(tiny.VARIANTS[name]), tmp_path / "adapter")
    torch.testing.assert_close(logits(kept), expected, rtol=1e-4, atol=1e-4)


def test_an_adapter_on_every_linear_map_is_merged_too():
    name = "delta_net-plain"
    model = tiny.build(tiny.VARIANTS[name])
    wanted = adaptation(model, ALL_LINEAR)
    adapted = wanted.attach(model)
    trained = shaken(adapted)
    stock = tiny.build(tiny.VARIANTS[name])
    stock.load_state_dict(wanted.merged(tiny.build(tiny.VARIANTS[name]), trained), strict=False)
    torch.testing.assert_close(logits(stock), logits(adapted), rtol=1e-4, atol=1e-4)


def test_what_was_trained_must_be_in_the_model():
    model = tiny.build(tiny.VARIANTS["delta_net-plain"])
    wanted = adaptation(model)
    trained = shaken(wanted.attach(model))
    missing = next(iter(trained))
    del trained[missing]
    with pytest.raises(AssertionError, match=missing):
        wanted.merged(tiny.build(tiny.VARIANTS["delta_net-plain"]), trained)


@pytest.mark.parametrize("name", ["delta_net-plain", "delta_net-tied", "gated_deltanet-hybrid"])
def test_full_training_trains_and_keeps_everything(name):
    model = tiny.build(tiny.VARIANTS[name]).requires_grad_(False)
    wanted = adaptation(model, full=True)
    assert (wanted.targets, wanted.convolutions, wanted.describe()) == ((), (), AdaptationSettings(full=True))
    adapted = wanted.attach(model)
    assert trainable(adapted).keys() == dict(model.named_parameters()).keys()
    assert all(gradient is not None for gradient in gradients(adapted).values())
    trained = shaken(adapted)
    merged = wanted.merged(tiny.build(tiny.VARIANTS[name]), trained)
    assert all(torch.equal(merged[tensor], trained[tensor]) for tensor in trained)
    stock = tiny.build(tiny.VARIANTS[name])
    stock.load_state_dict(merged)
    assert torch.equal(logits(stock), logits(adapted))


@pytest.mark.parametrize("name", ["delta_net-hybrid", "gated_deltanet-tied"])
@pytest.mark.parametrize("chosen", ["q_proj", "attn.q_proj", "down_proj", "k_proj, mlp.up_proj", ALL_LINEAR])
def test_chosen_endings_pick_linear_maps_by_their_last_names(name, chosen):
    model = tiny.build(tiny.VARIANTS[name])
    linear = [path.split(".") for path, part in model.named_modules() if isinstance(part, nn.Linear)]
    endings = [ending.strip().split(".") for ending in chosen.split(",")]
    expected = {
        ".".join(path)
        for path in linear
        if path != ["lm_head"] and (chosen == ALL_LINEAR or any(path[-len(end) :] == end for end in endings))
    }
    found = adaptation(model, chosen)
    assert set(found.targets) == expected != set()
    assert len(found.targets) == len(expected)
    assert found.convolutions == adaptation(model).convolutions
    assert modules_trained(found.attach(model))[0] == expected


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ("x_proj", "`lora_targets` x_proj matches no linear map; there are q_proj, .*down_proj, all-linear"),
        ("q_proj,x_proj", "`lora_targets` x_proj matches"),
        ("proj", "`lora_targets` proj matches"),  # only whole names
        ("layers.0.attn", "`lora_targets` layers.0.attn matches"),
        ("q_conv1d", "`lora_targets` q_conv1d matches"),
        ("embeddings", "`lora_targets` embeddings matches"),
        ("lm_head", "`lora_targets` lm_head matches"),
        ("res_proj", "`lora_targets` res_proj matches"),  # fla reads its weight and never calls it
        (" , ", "names nothing"),
    ],
)
def test_an_ending_that_names_no_linear_map_is_refused(chosen, message):
    with pytest.raises(PlanError, match=message):
        adaptation(tiny.build(tiny.VARIANTS["delta_net-residuals"]), chosen)


@pytest.mark.parametrize("name", ["delta_net-plain", "gated_deltanet-tied"])
def test_the_output_head_is_never_adapted(name):
    model = tiny.build(tiny.VARIANTS[name])
    for chosen in (None, ALL_LINEAR):
        assert "lm_head" not in adaptation(model, chosen).targets


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"full": True, "chosen": "q_proj"}, "leave out `lora_targets`"),
        ({"full": True, "unfreeze": "norms"}, "leave out `lora_targets` and `unfreeze`"),
        ({"unfreeze": "norm"}, "`unfreeze` norm: there are norms, biases"),
        ({"unfreeze": " ,"}, "`unfreeze` names nothing"),
        ({"rank": 0}, "rank 0 and alpha 32"),
        ({"alpha": 0}, "rank 16 and alpha 0"),
    ],
)
def test_settings_that_train_nothing_are_refused(options, message):
    with pytest.raises(PlanError, match=message):
        adaptation(tiny.build(tiny.VARIANTS["delta_net-plain"]), **options)


@pytest.mark.parametrize("options", [{"chosen": ALL_LINEAR}, PAPER])
@pytest.mark.parametrize("name", ["delta_net-plain", "gated_deltanet-plain"])
def test_of_a_bfloat16_model_what_is_trained_is_float32(name, options):
    model = tiny.build(tiny.VARIANTS[name]).to(torch.bfloat16)
    adapted = adaptation(model, **options).attach(model)
    assert {parameter.dtype for parameter in trainable(adapted).values()} == {torch.float32}
    rest = {parameter.dtype for parameter in adapted.parameters() if not parameter.requires_grad}
    assert rest == {torch.bfloat16}
    shaken(adapted)
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(adapted)
    assert all(gradient.dtype == torch.float32 and gradient.isfinite().all() for gradient in found.values())
    assert all(gradient.any() for gradient in found.values())


def test_full_training_of_a_bfloat16_model_is_float32():
    model = tiny.build(tiny.VARIANTS["delta_net-plain"]).to(torch.bfloat16)
    adapted = adaptation(model, full=True).attach(model)
    assert {parameter.dtype for parameter in adapted.parameters()} == {torch.float32}


def test_a_description_counts_modules_and_names_each_kind_once():
    described = adaptation(tiny.build(tiny.VARIANTS["delta_net-gate"]), rank=4, alpha=9).describe()
    assert described == AdaptationSettings(
        full=False,
        lora_rank=4,
        lora_alpha=9,
        targets=("b_proj", "g_proj", "k_proj", "o_proj", "q_proj", "v_proj"),
        convolutions=("k_conv1d", "q_conv1d", "v_conv1d"),
        modules=12,
    )
