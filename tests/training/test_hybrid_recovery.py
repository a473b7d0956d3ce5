"""Recovery of every family: adapters on the linear layers of the mixers, merged as the files store them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import slimstate
import tiny
from recoveries import Listener, cut, gradients, logits, perturb
from slimstate.checkpoints.reader import Checkpoint
from slimstate.checkpoints.safetensors_io import Replacement
from slimstate.checkpoints.writer import write_checkpoint
from slimstate.families import logit_factor
from slimstate.models.load import load
from slimstate.records.training import AdaptationSettings
from slimstate.system.errors import PlanError
from slimstate.training.adaptation import ALL_LINEAR, Adaptation, adaptation_of, rate_for, resolve
from slimstate.workflows.recover import RecoverConfig

pytestmark = pytest.mark.slow

NAMES = sorted(tiny.EVERY_PLAIN)
RENAMED = ("olmo_hybrid-plain", "norms,biases")  # the norms of its files have other names
ONLY_MIXERS = {
    "granitemoehybrid", "nemotron_h", "olmo_hybrid", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next", "qwen4_exp",
    "qwen4_exp_text",
}  # fmt: skip
BRIEF = {"batch_size": 2, "length": 32, "device": "cpu"}


def select(checkpoint: Checkpoint, **options) -> Adaptation:
    return adaptation_of(RecoverConfig.from_values(options), checkpoint)


@pytest.mark.parametrize("name", NAMES)
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


@pytest.mark.parametrize(
    ("name", "unfreeze"),
    [(name, unfreeze) for name in NAMES for unfreeze in (None, "norms,biases") if (name, unfreeze) != RENAMED],
)
def test_an_adapted_model_is_written_as_its_files_store_it(name, unfreeze, folders, tmp_path):
    checkpoint = Checkpoint.open(folders[name])
    selected = select(checkpoint, lora_rank=3, lora_alpha=5, unfreeze=unfreeze)
    adapted = selected.attach(load(folders[name], device="cpu").model)
    before = logits(adapted)
    parameters = perturb(adapted)
    expected = logits(adapted)
    assert (expected - before).abs().max() > 0.1
    idle = [part for part, grad in gradients(adapted.train()).items() if grad is None or not grad.any()]
    assert [part for part in idle if ".indexer." not in part] == []  # a choice of tokens, which has no gradient
    weights = checkpoint.in_files(selected.merge(load(folders[name], device="cpu").model, parameters))
    for part, tensor in weights.items():
        assert list(tensor.shape) == list(checkpoint.tensors[part].shape)
    write_checkpoint(checkpoint, Replacement(weights), checkpoint.config, {}, tmp_path / "out")
    torch.testing.assert_close(logits(load(tmp_path / "out", device="cpu").model), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_is_computed_from_the_logits_of_the_model(name, folders):
    model = load(folders[name], device="cpu").model
    with torch.no_grad():
        hidden = model.base_model(input_ids=tiny.token_ids(), use_cache=False).last_hidden_state
        computed = hidden * logit_factor(model.config.to_dict()) @ model.get_output_embeddings().weight.T
    torch.testing.assert_close(computed, logits(model), rtol=1e-4, atol=1e-4)


def test_weights_that_cannot_be_written_back_are_not_trained(folders):
    """Experts are joined when a model is loaded; softmax layers of a nested model are only renamed."""
    checkpoints = {name: Checkpoint.open(folders[f"{name}-plain"]) for name in ("qwen3_next", "qwen3_5", "mamba2")}
    with pytest.raises(PlanError, match="the files of qwen3_next models store it in another form"):
        select(checkpoints["qwen3_next"], full=True)
    with pytest.raises(PlanError, match=r"norm.weight cannot be trained.* leave out `full` and `unfreeze`, or"):
        select(Checkpoint.open(folders[RENAMED[0]]), unfreeze=RENAMED[1])
    select(checkpoints["qwen3_5"], lora_targets=ALL_LINEAR)
    select(Checkpoint.open(folders["qwen3_5_text-plain"]), full=True)
    select(checkpoints["mamba2"], lora_targets=ALL_LINEAR).attach(load(folders["mamba2-plain"], device="cpu").model)


@pytest.mark.parametrize("name", ["qwen3_5_moe-plain", "olmo_hybrid-plain", "nemotron_h-plain", "gla-plain"])
def test_a_cut_hybrid_is_recovered(name, folders, text_file, tmp_path):
    source, out = cut(folders[name], tmp_path / "cut"), tmp_path / "recovered"
    record = slimstate.recover(
        source, out, teacher=folders[name], data=text_file, lora=True, steps=6, lr=3e-3, report_to="none", **BRIEF
    )
    assert record.settings.adaptation.targets != ()
    assert record.measured.nats.after < record.measured.nats.before
    assert (logits(load(out, device="cpu").model) - logits(load(source, device="cpu").model)).abs().max() > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_by_default_everything_is_trained_that_can_be_written_back(name, folders):
    checkpoint = Checkpoint.open(folders[name])
    resolved, only_mixers = resolve(RecoverConfig(), checkpoint), name.removesuffix("-plain") in ONLY_MIXERS
    assert (resolved.adaptation.full, resolved.adaptation.mixers) == (not only_mixers, only_mixers)
    assert rate_for(checkpoint) == 5e-4


def test_where_experts_are_packed_only_the_mixers_are_trained_and_a_line_says_so(folders, text_file, tmp_path):
    source, out, listener = cut(folders["qwen3_next-plain"], tmp_path / "cut"), tmp_path / "out", Listener()
    options = {"teacher": folders["qwen3_next-plain"], "steps": 3, **BRIEF}
    record = slimstate.recover(source, out, data=text_file, report_to="none", progress=listener, **options)
    line = "only the mixers are trained: the files store other weights in another form"
    assert listener.lines.count(line) == 1
    before, after = Checkpoint.open(source), Checkpoint.open(out)
    within = tuple(f"{mixer.place_in_files}." for mixer in before.mixers)
    assert before.tensors.keys() == after.tensors.keys()
    for name in before.tensors:
        assert torch.equal(before.read(name), after.read(name)) != name.startswith(within), name
    settings = record.settings
    assert (settings.full, settings.mixers, settings.lr, settings.min_lr) == (False, True, 5e-4, 2.5e-5)
    assert settings.adaptation == AdaptationSettings(full=False, mixers=len(before.mixers))
    assert record.config["mixers"] is True
    assert "; the mixers whole)." in (out / "README.md").read_text()
    previewed = Listener()
    preview = slimstate.preview(source, progress=previewed, **options)
    assert line in previewed.lines
    assert (preview.settings, preview.trained_parameters) == (settings, record.trained_parameters)
