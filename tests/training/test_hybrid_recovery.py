"""Recovery of hybrids: adapters on the linear maps of the mixers, convolutions whole, merged as the files have it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import training_calls
from torch import nn
from training_calls import Listener

import slimstate
import tiny
from slimstate.checkpoints.reader import Checkpoint
from slimstate.checkpoints.safetensors_io import Replacement
from slimstate.checkpoints.writer import write_checkpoint
from slimstate.families import logit_factor
from slimstate.models.load import load
from slimstate.records.training import AdaptationSettings
from slimstate.system.errors import PlanError
from slimstate.training.adaptation import ALL_LINEAR, Adaptation, trainable
from slimstate.training.options import RecoverOptions, rate_for

pytestmark = pytest.mark.slow

NAMES = sorted(tiny.EVERY_PLAIN)
RENAMED = ("olmo_hybrid-plain", "norms,biases")  # the norms of its files have other names
MIXERS_ALONE = {
    "granitemoehybrid", "nemotron_h", "olmo_hybrid", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next", "qwen4_exp",
    "qwen4_exp_text",
}  # fmt: skip
IDS = tiny.token_ids(2, 40)


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("name", NAMES)
def test_what_is_trained_is_all_of_the_mixers_and_never_an_adapter_on_a_convolution(name, folders):
    checkpoint, model = Checkpoint.open(folders[name]), load(folders[name], device="cpu").model
    found = Adaptation.of(checkpoint.config, checkpoint.mixers)
    layers = {mixer.path: model.get_submodule(mixer.path) for mixer in checkpoint.mixers}
    kinds = {type(layer) for layer in layers.values()}
    assert [path for path, part in model.named_modules() if type(part) in kinds] == list(layers)
    inner = {f"{path}.{part}": kind for path, layer in layers.items() for part, kind in layer.named_modules()}
    called: set[str] = set()  # a layer may read the weight of a linear map itself, past an adapter
    for part, kind in inner.items():
        kind.register_forward_hook(lambda *_, part=part: called.add(part))
    logits(model)
    linear = {part for part, kind in inner.items() if isinstance(kind, nn.Linear) and part in called}
    if checkpoint.mixers[0].hook.fused_layers:  # fused kernels read past an adapter there
        linear = {part for part in linear if not part.endswith(".out_proj")}
    assert sorted(found.targets) == sorted(linear)
    assert sorted(found.convolutions) == sorted(part for part, kind in inner.items() if isinstance(kind, nn.Conv1d))


@pytest.mark.parametrize(
    ("name", "unfreeze"),
    [(name, unfreeze) for name in NAMES for unfreeze in (None, "norms,biases") if (name, unfreeze) != RENAMED],
)
def test_an_adapted_model_is_written_as_its_files_have_it(name, unfreeze, folders, tmp_path):
    checkpoint = Checkpoint.open(folders[name])
    wanted = RecoverOptions(lora_rank=3, lora_alpha=5, unfreeze=unfreeze).adaptation(checkpoint)
    adapted = wanted.attach(load(folders[name], device="cpu").model)
    before = logits(adapted)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trainable(adapted).values():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    expected = logits(adapted)
    assert (expected - before).abs().max() > 0.1
    adapted.train()
    F.cross_entropy(
        adapted(input_ids=IDS, use_cache=False).logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()
    ).backward()
    idle = [part for part, p in trainable(adapted).items() if p.grad is None or not p.grad.any()]
    assert [part for part in idle if ".indexer." not in part] == []  # a choice of tokens, which has no gradient

    trained = {part: parameter.detach().clone() for part, parameter in trainable(adapted).items()}
    merged = wanted.merged(load(folders[name], device="cpu").model, trained)
    changed = checkpoint.in_files(merged)
    assert changed.keys() <= checkpoint.tensors.keys()
    assert {name: list(tensor.shape) for name, tensor in changed.items()} == {
        name: list(checkpoint.tensors[name].shape) for name in changed
    }
    write_checkpoint(checkpoint, Replacement(changed), checkpoint.config, {}, tmp_path / "out")
    torch.testing.assert_close(logits(load(tmp_path / "out", device="cpu").model), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_sees_the_logits_of_the_model(name, folders):
    model = load(folders[name], device="cpu").model
    with torch.no_grad():
        hidden = model.base_model(input_ids=IDS, use_cache=False).last_hidden_state
        found = hidden * logit_factor(model.config.to_dict()) @ model.get_output_embeddings().weight.T
    torch.testing.assert_close(found, logits(model), rtol=1e-4, atol=1e-4)


def test_what_cannot_be_written_back_is_not_trained(folders):
    """Experts are joined when a model is loaded; softmax layers of a nested model are renamed, which is no matter."""
    with pytest.raises(PlanError, match="another form in the files of qwen3_next"):
        RecoverOptions(full=True).adaptation(Checkpoint.open(folders["qwen3_next-plain"]))
    with pytest.raises(PlanError, match=r"norm.weight is kept in another form.* leave out `full` and `unfreeze`, or"):
        RecoverOptions(unfreeze=RENAMED[1]).adaptation(Checkpoint.open(folders[RENAMED[0]]))
    RecoverOptions(lora_targets=ALL_LINEAR).adaptation(Checkpoint.open(folders["qwen3_5-plain"]))
    RecoverOptions(full=True).adaptation(Checkpoint.open(folders["qwen3_5_text-plain"]))
    everything = RecoverOptions(lora_targets=ALL_LINEAR).adaptation(Checkpoint.open(folders["mamba2-plain"]))
    everything.attach(load(folders["mamba2-plain"], device="cpu").model)


@pytest.mark.parametrize("name", ["qwen3_5_moe-plain", "olmo_hybrid-plain", "nemotron_h-plain", "gla-plain"])
def test_a_cut_hybrid_is_recovered(name, folders, text_file, tmp_path):
    slimstate.prune(folders[name], tmp_path / "cut", method="l1", key_dim=8)
    record = training_calls.recover(
        tmp_path / "cut", tmp_path / "recovered", teacher=folders[name], data=str(text_file),
        lora=True, steps=6, batch_size=2, length=32, lr=3e-3, device="cpu", report_to="none",
    )  # fmt: skip
    assert record.settings.adaptation.targets != ()
    assert record.measured.nats.after < record.measured.nats.before
    found = load(tmp_path / "recovered", device="cpu").model
    assert (logits(found) - logits(load(tmp_path / "cut", device="cpu").model)).abs().max() > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_by_default_all_is_trained_that_can_be_written_back(name, folders):
    checkpoint = Checkpoint.open(folders[name])
    found = RecoverOptions().for_model(checkpoint)
    alone = name.removesuffix("-plain") in MIXERS_ALONE
    assert (found.full, found.mixers) == (not alone, alone)
    assert RecoverOptions().adaptation(checkpoint) == found.adaptation(checkpoint)
    assert rate_for(checkpoint) == 5e-4


def test_where_experts_are_packed_the_mixers_alone_are_trained_and_that_is_said(folders, text_file, tmp_path):
    slimstate.prune(folders["qwen3_next-plain"], tmp_path / "cut", method="l1", key_dim=8)
    brief = {"teacher": folders["qwen3_next-plain"], "steps": 3, "batch_size": 2, "length": 32, "device": "cpu"}
    said = Listener()
    record = training_calls.recover(
        tmp_path / "cut", tmp_path / "out", data=str(text_file), report_to="none", progress=said, **brief
    )
    line = "the mixers alone are trained: the files keep other weights, such as experts, in another form"
    assert said.lines.count(line) == 1
    before, after = Checkpoint.open(tmp_path / "cut"), Checkpoint.open(tmp_path / "out")
    within = tuple(f"{mixer.place_in_files}." for mixer in before.mixers)
    assert before.tensors.keys() == after.tensors.keys()
    for name in before.tensors:
        assert torch.equal(before.read(name), after.read(name)) != name.startswith(within), name
    settings = record.settings
    assert (settings.full, settings.mixers, settings.lr, settings.min_lr) == (False, True, 5e-4, 2.5e-5)
    assert settings.adaptation == AdaptationSettings(full=False, mixers=len(before.mixers))
    assert "--mixers" in record.command
    assert "; the mixers whole)." in (tmp_path / "out" / "README.md").read_text()
    previewed = Listener()
    preview = training_calls.preview(tmp_path / "cut", progress=previewed, **brief)
    assert line in previewed.lines
    assert (preview.settings, preview.trained_parameters) == (settings, record.trained_parameters)
