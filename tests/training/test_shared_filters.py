"""Shared filters are trained as one, stored for every channel, and stay shared in cuts, rotations and recoveries."""

from pathlib import Path

import pytest
import torch
from torch.nn.utils import parametrize

import slimstate
import tiny
from recoveries import history_of, logits
from slimstate.checkpoints.reader import Checkpoint, described_mixers
from slimstate.core.file_names import PLAN
from slimstate.families import FAMILIES
from slimstate.models.hooks import hooked
from slimstate.models.load import load
from slimstate.models.stock import stock_model
from slimstate.records.plan import Plan
from slimstate.system.errors import ModelError
from slimstate.training.adaptation import Adaptation, trainable
from slimstate.training.options import AdaptationOptions
from slimstate.training.shared_filters import SharedFilters, expand, share

pytestmark = pytest.mark.slow
NAMES = [*tiny.PLAIN, "gated_deltanet-grouped-values"]
KINDS = ["head", "all"]
STEPS = ["full", "cut", "rotated", "recovered", "again"]
SHORT = {"steps": 3, "length": 32, "batch_size": 4, "lr": 1e-2, "report_to": "none", "no_teacher": True}


def shared_model(variant: tiny.Variant, folder: Path, sharing: str) -> Path:
    """Save a random model whose filters are shared, as training would leave it."""
    model = tiny.build(variant, slimstate={"shared_filters": sharing})
    share(model, described_mixers(model.config.to_dict()), initial=True)
    expand(model)
    return tiny.save(model, folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[tuple[str, str], Path]:
    root, pairs = tmp_path_factory.mktemp("shared"), [(name, kind) for name in NAMES for kind in KINDS]
    return {(name, kind): shared_model(tiny.VARIANTS[name], root / f"{name}-{kind}", kind) for name, kind in pairs}


def filters(folder: Path):
    """Yield every filter as [heads, channels, taps], by layer and role."""
    checkpoint = Checkpoint.open(folder)
    for mixer in checkpoint.mixers:
        for role, axis in mixer.filters:
            weight = checkpoint.read(mixer.name_of(axis.slots[0]))
            yield (mixer.layer, role), weight.view(axis.heads, axis.width, -1)


def check_shared(folder: Path, kind: str) -> None:
    for place, weight in filters(folder):
        assert torch.equal(weight, weight[:, :1].expand_as(weight)), place
        assert torch.equal(weight, weight[:1, :1].expand_as(weight)) == (kind == "all"), place


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_a_parametrised_model_is_the_plain_one_with_fewer_filters_to_train(name, kind, models):
    runtime, checkpoint = load(models[name, kind], device="cpu"), Checkpoint.open(models[name, kind])
    expected, before = logits(runtime.model), len(list(runtime.model.parameters()))
    share(runtime.model, checkpoint.mixers)
    assert torch.equal(logits(runtime.model), expected)
    mixer = checkpoint.mixers[0]
    for role, axis in mixer.filters:
        module = runtime.model.get_submodule(f"{mixer.path}.{role[0]}_conv1d")
        assert module.parametrizations.weight.original.shape[0] == (axis.heads if kind == "head" else 1)
    assert len(list(runtime.model.parameters())) == before
    expand(runtime.model)
    assert not any(parametrize.is_parametrized(module) for module in runtime.model.modules())
    assert runtime.model.state_dict().keys() == load(models[name, kind], device="cpu").model.state_dict().keys()
    assert torch.equal(logits(runtime.model), expected)


def test_the_gradient_of_a_shared_filter_is_the_sum_over_its_channels():
    torch.manual_seed(0)
    shared = SharedFilters(2, 6)
    filters, target = torch.randn(2, 1, 4, requires_grad=True), torch.randn(6, 1, 4)
    (shared(filters) * target).sum().backward()
    assert torch.allclose(filters.grad, target.view(2, 3, 1, 4).sum(1))
    assert torch.equal(shared.right_inverse(shared(filters)), filters)


@pytest.fixture(scope="module")
def results(models, text_file, tmp_path_factory) -> Path:
    """Models with shared filters that were trained, cut, rotated and recovered."""
    root = tmp_path_factory.mktemp("results")
    for kind in KINDS:
        source = models[tiny.PLAIN[kind == "all"], kind]
        out = {step: root / f"{kind}-{step}" for step in STEPS}
        slimstate.recover(source, out["full"], data=text_file, full=True, **SHORT)
        slimstate.prune(source, out["cut"], method="l1", key_dim=8)
        slimstate.prune(source, out["rotated"], method="random-rotation", key_dim=8)
        slimstate.recover(out["cut"], out["recovered"], data=text_file, lora=True, **SHORT)
        slimstate.recover(out["recovered"], out["again"], data=text_file, lora=True, **SHORT)
    return root


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("kind", KINDS)
def test_filters_stay_shared_in_files_as_the_stock_class_has_them(kind, step, results):
    folder = results / f"{kind}-{step}"
    check_shared(folder, kind)
    assert history_of(folder)["shared_filters"] == kind
    checkpoint = Checkpoint.open(folder)
    shapes = {name: list(tensor.shape) for name, tensor in stock_model(checkpoint.config).state_dict().items()}
    assert {name: list(info.shape) for name, info in checkpoint.tensors.items()} == shapes


@pytest.mark.parametrize("kind", KINDS)
def test_training_changes_the_shared_filters(kind, models, results):
    source = models[tiny.PLAIN[kind == "all"], kind]
    before, after = dict(filters(source)), dict(filters(results / f"{kind}-full"))
    assert all(not torch.equal(before[place], after[place]) for place in before)
    mixers = Checkpoint.open(source).mixers
    adaptation = Adaptation.of(Checkpoint.open(source).config, mixers, AdaptationOptions())
    adapted = adaptation.attach(load(source, device="cpu").model)
    sizes = {len(parameter) for name, parameter in trainable(adapted).items() if "conv1d" in name}
    assert sizes == ({mixers[0].axis.heads} if kind == "head" else {1})


def test_filters_that_differ_are_not_treated_as_shared(models, tmp_path):
    folder = tiny.save(tiny.build(tiny.VARIANTS[tiny.PLAIN[0]], slimstate={"shared_filters": "head"}), tmp_path / "odd")
    with pytest.raises(ModelError, match="q_conv1d: its channels should share a filter"):
        share(load(folder, device="cpu").model, Checkpoint.open(folder).mixers)
    with pytest.raises(ModelError, match="shared_filters 'some'"):
        FAMILIES["delta_net"].mixers({"slimstate": {"shared_filters": "some"}})


def test_without_an_activation_shared_filters_make_a_rotated_cut_exact(tmp_path):
    """The lemma in a whole model; with SiLU behind the filters it fails, and the mixer says so."""
    straight = tiny.Variant("shared-straight", "delta_net", {"expand_k": 0.75, "qk_activation": "identity"})
    source = shared_model(straight, tmp_path / "model", "head")
    record = slimstate.prune(source, tmp_path / "cut", method="random-rotation", key_dim=8, keep_norm_eps=True)
    assert record.noncommuting == ()
    plan = Plan.read(tmp_path / "cut" / PLAN)
    runtime, mixers = load(source, device="cpu"), Checkpoint.open(source).mixers

    def project(mixer, role, x):
        rows = plan.selections[mixer.layer].rows
        return torch.einsum("bthd,hkd,hke->bthe", x, rows, rows)

    with hooked(runtime.model, mixers, project, scale=8**-0.5):
        expected = logits(runtime.model)
    torch.testing.assert_close(logits(load(tmp_path / "cut", device="cpu").model), expected, rtol=1e-4, atol=1e-4)
    bent = Checkpoint.open(shared_model(tiny.VARIANTS[tiny.PLAIN[0]], tmp_path / "bent", "head"))
    assert bent.mixers[0].noncommuting == ("the activation silu",)
