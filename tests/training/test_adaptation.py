"""What is trained is the mixers, all of them and nothing else; afterwards it is in files for the stock class."""

from copy import deepcopy

import pytest
import torch
from torch import nn

import slimstate
import tiny
from recoveries import PAPER, Listener, cut, gradients, logits, perturb
from slimstate.checkpoints.reader import Checkpoint, described_mixers
from slimstate.checkpoints.safetensors_io import Replacement
from slimstate.checkpoints.writer import new_checkpoint
from slimstate.models.load import load
from slimstate.records.training import AdaptationSettings
from slimstate.system.errors import PlanError
from slimstate.training.adaptation import ALL_LINEAR, Adaptation, adaptation_of, rate_for, resolve, trainable
from slimstate.training.options import AdaptationOptions
from slimstate.workflows.options import RecoverConfig

pytestmark = pytest.mark.slow
SOME = (
    "delta_net-gate", "delta_net-no-conv", "delta_net-tied", "delta_net-hybrid", "gated_deltanet-grouped-values",
    "gated_deltanet-no-conv", "gated_deltanet-tied", "gated_deltanet-hybrid",
)  # fmt: skip
EVERY = sorted({*tiny.EVERY_PLAIN, *(name for name in tiny.VARIANTS if "delta_net-" in name or "deltanet-" in name)})
# more targets than PEFT lists one by one
LONG = {"attn": {**tiny.WITH_SOFTMAX, "layers": [1, 4]}, "num_hidden_layers": 7}
RENAMED = "olmo_hybrid-plain"  # the norms of its files have other names
ONLY_MIXERS = {
    "glm5_next", "granitemoehybrid", "kimi_linear", "nemotron_h", "olmo_hybrid", "qwen3_5_moe", "qwen3_5_moe_text",
    "qwen3_next", "qwen4_exp", "qwen4_exp_text",
}  # fmt: skip
BRIEF = {"batch_size": 2, "length": 32, "device": "cpu"}
NO_LINEAR_LAYERS = ("proj", "layers.0.attn", "q_conv1d", "embeddings", "lm_head", "res_proj")  # fla reads its weight
SMALL = {"lora_rank": 3, "lora_alpha": 5}
MERGED = [(name, SMALL) for name in (*SOME, RENAMED)]
UNFROZEN = [name for name in (*tiny.DISTINCT, "minicpmv4_6-plain") if name != RENAMED]
MERGED += [(name, {**SMALL, "unfreeze": "norms,biases"}) for name in UNFROZEN]
MERGED += [(name, {**PAPER, "unfreeze": "norms, biases"}) for name in (*SOME, "delta_net-plain")]
MERGED += [(name, {**PAPER, "unfreeze": kind}) for name in (SOME[0], SOME[-1]) for kind in ("norms", "biases")]
MERGED += [(name, {"full": True}) for name in ("delta_net-plain", "delta_net-tied", "gated_deltanet-hybrid")]
MERGED += [("delta_net-plain", {"lora_targets": ALL_LINEAR})]


def build(name: str, **changes) -> nn.Module:
    return tiny.build(tiny.VARIANTS[name], **changes)


def adaptation(model, **options) -> Adaptation:
    config = model.config.to_dict()
    return Adaptation.of(config, described_mixers(config), AdaptationOptions(**options))


def select(checkpoint: Checkpoint, **options) -> Adaptation:
    return adaptation_of(RecoverConfig.from_values(options), checkpoint)


def modules_trained(adapted) -> tuple[set[str], set[str]]:
    """Return the stock names of the modules with an adapter, and of those trained whole."""
    names = [name.removeprefix("base_model.model.") for name in trainable(adapted)]
    low_rank = {name.partition(".lora_")[0] for name in names if ".lora_" in name}
    return low_rank, {name.partition(".modules_to_save.")[0] for name in names if ".lora_" not in name}


def idle(adapted) -> list[str]:
    """Return the trained parameters without a gradient, except those that choose tokens."""
    grads = gradients(adapted).items()
    return [name for name, grad in grads if (grad is None or not grad.any()) and ".indexer." not in name]


@pytest.mark.parametrize("name", EVERY)
def test_adapters_are_on_all_linear_layers_of_the_mixers_and_never_on_a_convolution(name, folders):
    checkpoint, model = Checkpoint.open(folders[name]), load(folders[name], device="cpu").model
    selected = select(checkpoint)
    layers = {mixer.path: model.get_submodule(mixer.path) for mixer in checkpoint.mixers}
    kinds = {type(layer) for layer in layers.values()}
    assert [path for path, part in model.named_modules() if type(part) in kinds] == list(layers)
    inner = {f"{path}.{part}": kind for path, layer in layers.items() for part, kind in layer.named_modules()}
    called: set[str] = set()  # a mixer may read the weight of a linear layer itself, past an adapter
    for part, kind in inner.items():
        kind.register_forward_hook(lambda *_, part=part: called.add(part))
    logits(model)
    linear = {part for part, kind in inner.items() if isinstance(kind, nn.Linear) and part in called}
    if checkpoint.mixers[0].hook.fused_layers:  # fused kernels read past an adapter there
        linear = {part for part in linear if not part.endswith(".out_proj")}
    assert sorted(selected.targets) == sorted(linear)
    assert sorted(selected.convolutions) == sorted(part for part, kind in inner.items() if isinstance(kind, nn.Conv1d))


@pytest.mark.parametrize("targets", [None, ALL_LINEAR])
@pytest.mark.parametrize("name", [*SOME, "delta_net-powlu", "delta_net-residuals", "delta_net-unfused"])
def test_all_adapters_and_convolutions_learn_and_nothing_else(name, targets):
    model = build(name, **(LONG if "hybrid" in name else {}))
    before, selected = logits(model), adaptation(model, lora_targets=targets)
    adapted = selected.attach(model)
    torch.testing.assert_close(logits(adapted), before, rtol=1e-5, atol=1e-5)
    assert modules_trained(adapted) == ({*selected.targets}, {*selected.convolutions})
    assert "lm_head" not in selected.targets
    if "hybrid" in name and targets is None:  # softmax layers are not trained
        assert {part.split(".")[2] for part in selected.targets} == {"0", "2", "3", "5", "6"}
    perturb(adapted)  # at first B is zero, and A has no gradient
    assert idle(adapted) == []
    assert all(p.grad is None for p in adapted.parameters() if not p.requires_grad)


@pytest.mark.parametrize(("name", "options"), MERGED, ids=str)
def test_the_written_weights_and_the_stored_adapter_are_the_trained_model(name, options, folders, tmp_path):
    from peft import PeftModel

    checkpoint, model = Checkpoint.open(folders[name]), load(folders[name], device="cpu").model
    selected = select(checkpoint, **options)
    adapted = selected.attach(deepcopy(model).requires_grad_(False))
    before = logits(adapted)
    parameters = perturb(adapted)
    expected = logits(adapted)
    assert (expected - before).abs().max() > 0.1
    assert idle(adapted.train()) == []
    weights = checkpoint.in_files(selected.merge(deepcopy(model), parameters, tmp_path / "adapter"))
    for part, tensor in weights.items():
        assert list(tensor.shape) == list(checkpoint.tensors[part].shape)
    change = Replacement(weights)
    with new_checkpoint(checkpoint, change, tmp_path / "out", force=False) as writer:
        writer.finish(change, checkpoint.config, {})
    written, original = load(tmp_path / "out", device="cpu").model, dict(model.named_parameters())
    torch.testing.assert_close(logits(written), expected, rtol=1e-3, atol=0 if selected.full else 1e-3)
    changed = {part for part, parameter in written.named_parameters() if not torch.equal(parameter, original[part])}
    assert changed == {*selected.weights(checkpoint.config)}
    kinds = [kind.strip() for kind in options.get("unfreeze", "").split(",")]
    endings = [ending for kind, ending in (("norms", "norm"), ("biases", "bias")) if kind in kinds]
    if name in SOME and not selected.full:
        vectors = {part for part, parameter in original.items() if parameter.ndim == 1}
        unfrozen = {part for part in vectors if any(ending in part for ending in endings)}
        assert vectors & changed == unfrozen
        assert any(part.endswith("dt_bias") for part in unfrozen) == (name.startswith("gated") and "biases" in kinds)
        for part in selected.targets:
            difference = written.get_parameter(f"{part}.weight") - original[f"{part}.weight"]
            assert torch.linalg.matrix_rank(difference, rtol=1e-4) <= options.get("lora_rank", 16)
    if selected.has_adapters and ALL_LINEAR not in options.values():  # a fused MLP reads past its adapters
        loaded = PeftModel.from_pretrained(deepcopy(model), tmp_path / "adapter")
        torch.testing.assert_close(logits(loaded), expected, rtol=1e-4, atol=1e-4)


def test_trained_parameters_must_be_in_the_model():
    model = build("delta_net-plain")
    selected = adaptation(model)
    parameters = perturb(selected.attach(model))
    missing = next(iter(parameters))
    del parameters[missing]
    with pytest.raises(AssertionError, match=missing):
        selected.merge(build("delta_net-plain"), parameters)


@pytest.mark.parametrize("name", ["delta_net-hybrid", "gated_deltanet-tied"])
@pytest.mark.parametrize("targets", ["q_proj", "attn.q_proj", "down_proj", "k_proj, mlp.up_proj", ALL_LINEAR])
def test_targets_are_endings_of_the_names_of_linear_layers(name, targets):
    model = build(name)
    linear = [path.split(".") for path, part in model.named_modules() if isinstance(part, nn.Linear)]
    endings = [ending.strip().split(".") for ending in targets.split(",")]
    expected = [
        ".".join(path)
        for path in linear
        if path != ["lm_head"] and (targets == ALL_LINEAR or any(path[-len(end) :] == end for end in endings))
    ]
    selected = adaptation(model, lora_targets=targets)
    assert sorted(selected.targets) == sorted(expected) != []
    assert selected.convolutions == adaptation(model).convolutions
    assert modules_trained(selected.attach(model))[0] == {*expected}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora_targets": "x_proj"}, "x_proj matches no linear layer; there are q_proj, .*down_proj, all-linear"),
        ({"lora_targets": "q_proj,x_proj"}, "`lora_targets` x_proj matches"),
        *(({"lora_targets": name}, f"`lora_targets` {name} matches") for name in NO_LINEAR_LAYERS),
        ({"lora_targets": " , "}, "`lora_targets` must name at least one linear layer"),
        ({"full": True, "lora_targets": "q_proj"}, "`lora_targets` has no effect: `full` trains no adapters"),
        ({"full": True, "unfreeze": "norms"}, "`unfreeze` has no effect: `full` trains no adapters"),
        ({"unfreeze": "norm"}, "`unfreeze` must be norms or biases, or both, got 'norm'"),
        ({"unfreeze": " ,"}, "`unfreeze` must be norms or biases"),
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
    assert adaptation(build("delta_net-gate"), full=True).describe() == AdaptationSettings(full=True)
    assert adaptation(build("delta_net-gate"), lora_rank=4, lora_alpha=9).describe() == AdaptationSettings(
        full=False, lora_rank=4, lora_alpha=9, modules=12, convolutions=("k_conv1d", "q_conv1d", "v_conv1d"),
        targets=("b_proj", "g_proj", "k_proj", "o_proj", "q_proj", "v_proj"),
    )  # fmt: skip


def test_weights_that_cannot_be_written_back_are_not_trained(folders):
    """Experts are joined when a model is loaded; softmax layers of a nested model are only renamed."""
    for name, options, message in (
        ("qwen3_next-plain", {"full": True}, "the files of qwen3_next models store it in another form"),
        (RENAMED, {"unfreeze": "norms"}, r"norm.weight cannot be trained.* leave out `full` and `unfreeze`, or"),
    ):
        with pytest.raises(PlanError, match=message):
            select(Checkpoint.open(folders[name]), **options)
    select(Checkpoint.open(folders["qwen3_5-plain"]), lora_targets=ALL_LINEAR)
    selected = select(Checkpoint.open(folders["mamba2-plain"]), lora_targets=ALL_LINEAR)
    selected.attach(load(folders["mamba2-plain"], device="cpu").model)


@pytest.mark.parametrize("name", sorted(tiny.EVERY_PLAIN))
def test_by_default_everything_is_trained_that_can_be_written_back(name, folders):
    checkpoint = Checkpoint.open(folders[name])
    resolved, only_mixers = resolve(RecoverConfig(), checkpoint), name.removesuffix("-plain") in ONLY_MIXERS
    assert (resolved.adaptation.full, resolved.adaptation.mixers) == (not only_mixers, only_mixers)
    assert rate_for(checkpoint) == 5e-4


@pytest.mark.parametrize("name", ["qwen3_5_moe-plain", "olmo_hybrid-plain", "nemotron_h-plain", "gla-plain"])
def test_a_cut_hybrid_is_recovered(name, folders, text_file, tmp_path):
    source, out = cut(folders[name], tmp_path / "cut"), tmp_path / "recovered"
    options = {"lora": True, "steps": 6, "lr": 3e-3, "report_to": "none", **BRIEF}
    record = slimstate.recover(source, out, teacher=folders[name], data=text_file, **options)
    assert record.settings.adaptation.targets != ()
    assert record.measured.nats.after < record.measured.nats.before
    assert (logits(load(out, device="cpu").model) - logits(load(source, device="cpu").model)).abs().max() > 1e-3


def test_where_experts_are_packed_only_the_mixers_are_trained_and_a_line_says_so(folders, text_file, tmp_path):
    source, out, listener = cut(folders["qwen3_next-plain"], tmp_path / "cut"), tmp_path / "out", Listener()
    options = {"teacher": folders["qwen3_next-plain"], "steps": 3, "progress": listener, **BRIEF}
    record = slimstate.recover(source, out, data=text_file, report_to="none", **options)
    before, after, settings = Checkpoint.open(source), Checkpoint.open(out), record.settings
    within = tuple(f"{mixer.place_in_files}." for mixer in before.mixers)
    assert before.tensors.keys() == after.tensors.keys()
    for name in before.tensors:
        assert torch.equal(before.read(name), after.read(name)) != name.startswith(within), name
    assert (settings.full, settings.mixers, settings.lr, settings.min_lr) == (False, True, 5e-4, 2.5e-5)
    assert settings.adaptation == AdaptationSettings(full=False, mixers=len(before.mixers))
    assert record.config["mixers"] is True
    assert "; the mixers whole)." in (out / "README.md").read_text()
    preview = slimstate.preview(source, **options)
    assert (preview.settings, preview.trained_parameters) == (settings, record.trained_parameters)
    assert listener.lines.count("only the mixers are trained: the files store other weights in another form") == 2
