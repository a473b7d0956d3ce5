"""Heads of a cut that are made from other heads of the uncut model."""

import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import slimstate
import tiny
from launching import launch, stock_logits
from launching import options as options_of
from recoveries import Listener, confident
from slimstate.checkpoints.reader import Checkpoint
from slimstate.core.file_names import PLAN
from slimstate.core.layout import Mixer
from slimstate.core.selection import Choice, Selection
from slimstate.models.hooks import masked
from slimstate.models.load import load
from slimstate.pruning import heads
from slimstate.pruning.heads import find_origins
from slimstate.pruning.planning import divide
from slimstate.records.plan import Plan
from slimstate.system.errors import PlanError
from slimstate.system.progress import SILENT

KEY_DIM = 8
FAMILIES = ("delta_net", "gated_deltanet", "qwen3", "minicpm")
VARIANTS = tuple(name for name in tiny.VARIANTS if name.startswith(FAMILIES) and name != "delta_net-no-beta")
MOVABLE = tuple(name for name in VARIANTS if name in tiny.EVERY_PLAIN)


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=tiny.token_ids(), use_cache=False).logits


def everything(mixer: Mixer, origins: list[int]) -> Selection:
    keep = torch.arange(mixer.axis.width).expand(mixer.axis.heads, -1)
    return Selection(keep=keep, origins=torch.tensor(origins))


def rearranged(choice: Choice, origins: torch.Tensor) -> Choice:
    """Return a choice with the same channels of each uncut head, and values likewise."""
    values = choice.values
    if values is not None:
        copies = len(values) // len(origins)
        values = values.unflatten(0, (len(origins), copies))[origins].flatten(0, 1)
    return replace(choice, keep=choice.keep[origins], values=values, origins=origins, certificate={})


@pytest.fixture(scope="module")
def arranged(folders, tmp_path_factory) -> dict[tuple[str, str], Path]:
    """Cuts whose heads are in their own order, in another one, and with copies; run by the stock classes."""
    root = tmp_path_factory.mktemp("arranged")
    cuts = {}
    for name in MOVABLE:
        mixer = Checkpoint.open(folders[name]).mixers[0]
        sizes = {"key_dim": KEY_DIM, "value_dim": mixer.value_dim // 2, "value_method": "random"}
        slimstate.prune(folders[name], root / f"{name}-own", method="random", **sizes)
        plan, count = Plan.read(root / f"{name}-own" / PLAN), mixer.axis.heads
        for kind, origins in ("turned", torch.arange(count).flip(0)), ("copied", torch.zeros(count, dtype=torch.long)):
            choices = {layer: rearranged(choice, origins) for layer, choice in plan.selections.items()}
            replace(plan, selections=choices).write(path := root / f"{name}-{kind}.json")
            slimstate.prune(folders[name], root / f"{name}-{kind}", apply=path)
        cuts |= {(name, kind): root / f"{name}-{kind}" for kind in ("own", "turned", "copied")}
    torch.save(tiny.token_ids(), root / "ids.pt")
    for words, library in (((), tiny.OF_FLA), (("--without-fla",), tiny.OF_TRANSFORMERS)):
        stock_logits(root / "ids.pt", [cut for (name, _), cut in cuts.items() if name in library], *words)
    return cuts


@pytest.mark.slow
@pytest.mark.parametrize("name", MOVABLE)
def test_the_order_of_heads_does_not_matter_and_copies_are_those_of_the_mask(name, arranged, folders):
    files = (next(arranged[name, kind].glob("logits*.pt")) for kind in ("own", "turned", "copied"))
    own, turned, copied = map(torch.load, files)
    torch.testing.assert_close(turned, own, rtol=1e-4, atol=1e-4)
    plan = Plan.read(arranged[name, "copied"] / PLAN)
    assert all(not any(heads) for heads in plan.origins.values())
    model = load(folders[name], device="cpu").model
    with masked(model, Checkpoint.open(folders[name]).mixers, plan.selections):
        torch.testing.assert_close(logits_of(model), copied, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(copied, own, atol=1e-2)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_order_of_heads_does_not_matter_with_any_option(name, folders):
    runtime, mixers = load(folders[name], device="cpu"), Checkpoint.open(folders[name]).mixers
    turned = {mixer.layer: everything(mixer, list(range(mixer.axis.heads))[::-1]) for mixer in mixers}
    uncut = logits_of(runtime.model)
    with masked(runtime.model, mixers, turned):
        torch.testing.assert_close(logits_of(runtime.model), uncut, rtol=1e-4, atol=1e-4)
    assert torch.equal(logits_of(runtime.model), uncut)


@pytest.mark.parametrize("name", MOVABLE)
def test_copies_with_all_channels_are_the_model_without_the_other_heads(name, folders):
    runtime, checkpoint = load(folders[name], device="cpu"), Checkpoint.open(folders[name])
    mixers = checkpoint.mixers
    with masked(runtime.model, mixers, {mixer.layer: everything(mixer, [0] * mixer.axis.heads) for mixer in mixers}):
        copies = logits_of(runtime.model)
    for mixer in mixers:
        output = mixer.value_axis.output
        columns = mixer.value_axis.all_rows(output)[:, mixer.value_heads // mixer.axis.heads :].flatten()
        weight = runtime.model.get_submodule(mixer.path).get_parameter(output.parameter)
        weight.data.index_fill_(output.dim, columns, 0.0)
    torch.testing.assert_close(copies, logits_of(runtime.model), rtol=1e-4, atol=1e-5)


def test_channels_are_divided_among_the_copies_until_each_has_the_key_dim():
    parts = [part.tolist() for part in divide(torch.arange(0, 12, 2), 3, 2)]
    assert parts == [[0, 6], [2, 8], [4, 10]]
    parts = [part.tolist() for part in divide(torch.arange(5), 2, 4)]  # some are there twice
    assert parts == [[0, 1, 2, 4], [0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("name", "origins", "message"),
    [
        ("delta_net-plain", [0, 0, 0], "must be 2 heads of 0 to 1"),
        ("delta_net-plain", [0, 2], r"heads from \[0, 2\], but only 2 heads"),
        ("gla-plain", [0, 0], "cannot be made from others"),
    ],
)
def test_heads_that_do_not_exist_or_cannot_move_are_refused(name, origins, message, folders, tmp_path):
    slimstate.prune(folders[name], tmp_path / "cut", method="l1", key_dim=KEY_DIM)
    plan = json.loads((tmp_path / "cut" / PLAN).read_text())
    plan["layers"]["0"]["origins"] = origins
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(PlanError, match=message):
        slimstate.prune(folders[name], tmp_path / "out", apply=tmp_path / "plan.json")
    assert not (tmp_path / "out").exists()


class Costs:
    """Predictions of a model in which a head of layer 1 costs less the more copies it has, and others nothing."""

    def __init__(self, other_layers: float) -> None:
        self.other_layers = other_layers

    def cost(self, mixer: Mixer, choice: Choice, head: int | None = None) -> float:
        if mixer.layer != 1:
            return self.other_layers
        if head is not None:
            return 1.0 * (head == 2)
        copies = int((choice.origins == 2).sum())
        return 1.0 / copies if copies else 5.0


def test_layers_that_hardly_lose_are_left_alone(folders):
    mixers = Checkpoint.open(folders["delta_net-plain"]).mixers
    own = torch.arange(8).expand(2, -1)
    costs = Mock(cost=Mock(return_value=0.019))
    assert not find_origins(costs, mixers, lambda _, origins: Selection(keep=own, origins=origins), SILENT)
    assert costs.cost.call_count == len(mixers)


@pytest.mark.parametrize("other_layers", [0.0, -1.0])
@pytest.mark.parametrize(("key_dim", "copies"), [(6, 4), (8, 3), (12, 2)])
def test_the_head_that_loses_takes_places_until_it_has_all_of_its_channels(other_layers, key_dim, copies, folders):
    mixer = Checkpoint.open(folders["delta_net-plain"]).mixers[0]
    mixers = [replace(mixer, layer=layer, axis=replace(mixer.axis, heads=4, width=24)) for layer in range(2)]
    keep = torch.arange(key_dim).expand(4, -1)
    found = find_origins(Costs(other_layers), mixers, lambda _, origins: Selection(keep=keep, origins=origins), SILENT)
    assert list(found) == [1]
    assert found[1].tolist().count(2) == copies


TRAINING = {"reconstruct": True, "reconstruct_steps": 2, "reconstruct_samples": 6, "reconstruct_length": 32}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["drrqr", "l1"])  # whose channels are chosen in the walk, and before it
def test_plan_and_card_of_a_reconstructed_cut_have_the_origins(method, folders, text_file, tmp_path, monkeypatch):
    source, listener = folders["delta_net-plain"], Listener()
    monkeypatch.setattr(heads, "find_origins", lambda *_: {1: torch.tensor([1, 1])})
    options = {"key_dim": 12, "method": method, "data": text_file, **TRAINING}
    record = slimstate.prune(source, tmp_path / "out", **options, progress=listener)
    assert "layer 1: heads that lose most take the places of others (not with `keep_heads`)" in listener.lines
    assert record.plan.origins == {1: [1, 1]}
    assert [row["origin"] for row in record.table()] == [0, 1, 1, 1]
    keep = record.plan.selections[1].keep
    assert sorted(keep.flatten().tolist()) == list(range(24))  # half of the channels each
    assert "layer 1 has the heads 1, 1 of the uncut layer" in (tmp_path / "out" / "README.md").read_text()
    assert load(tmp_path / "out", device="cpu").model.config.slimstate["key_dim"] == 12
    again = slimstate.prune(source, tmp_path / "again", apply=tmp_path / "out" / PLAN)
    assert again.plan.same_cut(record.plan)
    kept = slimstate.prune(source, tmp_path / "kept", **options, keep_heads=True)
    assert not kept.plan.origins
    assert "took the places" not in (tmp_path / "kept" / "README.md").read_text()
    before = [layer.held_out_before for layer in (record.reconstruction.layers[1], kept.reconstruction.layers[1])]
    assert before[0] != before[1]


@pytest.mark.slow
def test_two_processes_share_the_measurement_and_find_the_same_heads(text_file, tmp_path):
    model = tiny.save(confident("delta_net-plain"), tmp_path / "model")
    options = {"key_dim": KEY_DIM, "data": text_file, **TRAINING, "reconstruct_samples": 12, "device": "cpu"}
    one = slimstate.prune(model, tmp_path / "one", **options)
    assert one.plan.origins
    ended = launch(2, tmp_path, "-m", "slimstate", "prune", model, *options_of(**options), "--out", tmp_path / "two")
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert Plan.read(tmp_path / "two" / PLAN).origins == one.plan.origins


@pytest.mark.parametrize(
    ("name", "function", "reason"),
    [
        ("free_bytes", lambda device: 1000, "the model does not fit into memory as a whole"),
        ("find_origins", Mock(side_effect=torch.OutOfMemoryError), "measuring others ran out of memory"),
    ],
)
def test_where_memory_is_too_small_heads_stay_and_a_line_says_so(
    name, function, reason, folders, text_file, tmp_path, monkeypatch
):
    listener = Listener()
    monkeypatch.setattr(heads, name, function)
    model, options = folders["delta_net-plain"], {"key_dim": KEY_DIM, "data": text_file, **TRAINING}
    slimstate.prune(model, tmp_path / "out", **options, progress=listener)
    assert f"every head is made from its own: {reason}" in listener.lines


@pytest.mark.parametrize("name", ["qwen3_next-plain", "delta_net-hybrid"])
def test_hybrids_whose_softmax_layers_remember_too_keep_their_heads(name, folders, text_file, tmp_path, monkeypatch):
    monkeypatch.setattr(heads, "find_origins", Mock(side_effect=AssertionError))
    options, listener = {"key_dim": KEY_DIM, "data": text_file, **TRAINING}, Listener()
    assert not slimstate.prune(folders[name], tmp_path / "out", **options).plan.origins
    slimstate.prune(folders[name], tmp_path / "kept", **options, keep_heads=True, progress=listener)
    assert f"no effect with {name.partition('-')[0]}: `keep_heads`" in listener.lines


def test_keep_heads_needs_a_reconstruction(folders, text_file):
    with pytest.raises(PlanError, match="`keep_heads` needs `reconstruct`"):
        slimstate.prune(folders["delta_net-plain"], key_dim=KEY_DIM, data=text_file, keep_heads=True)
