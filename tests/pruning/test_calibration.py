"""Evidence matches its definitions however the tokens are split, and only what is needed is collected."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import slimstate
import tiny
from slimstate.checkpoints.reader import Checkpoint
from slimstate.core.evidence import EvidenceFile
from slimstate.models.hooks import hooked
from slimstate.models.load import load
from slimstate.pruning import calibration
from slimstate.pruning.calibration import calibrate
from slimstate.system.errors import DataError, ModelError

EVERYTHING = frozenset({"gram", "moments", "input", "gradient", "weighted"})
TOKENS = tiny.token_ids(10, 48)


@pytest.fixture(params=tiny.PLAIN)
def loaded(request, folders):
    folder = folders[request.param]
    return load(folder, device="cpu"), Checkpoint.open(folder).mixers


def close(a, b):
    for (name, x), (other, y) in zip(a.tensors(), b.tensors(), strict=True):
        assert name == other
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4 * float(y.abs().max()))


def test_one_batch_is_ten_batches_is_two_merged_halves(loaded, monkeypatch):
    runtime, mixers = loaded
    whole = calibrate(runtime, mixers, TOKENS, EVERYTHING)
    monkeypatch.setitem(calibration.TOKENS_AT_ONCE, "cpu", 48)
    tenths = calibrate(runtime, mixers, TOKENS, EVERYTHING)
    halves = [calibrate(runtime, mixers, part, EVERYTHING) for part in TOKENS.split(5)]
    for layer in whole:
        assert whole[layer].tokens == tenths[layer].tokens == TOKENS.numel()
        close(whole[layer], tenths[layer])
        close(whole[layer], halves[0][layer].merged(halves[1][layer]))


def test_grams_and_norms_are_those_of_the_post_convolution_activations(loaded):
    runtime, mixers = loaded
    inputs = []
    layer = runtime.model.get_submodule(mixers[0].path)
    handle = layer.register_forward_pre_hook(lambda *call: inputs.append(call[2]["hidden_states"]), with_kwargs=True)
    evidence = calibrate(runtime, mixers[:1], TOKENS, frozenset({"gram", "moments", "input"}))[0]
    handle.remove()
    x = torch.cat(inputs)
    for role, projection, convolution in (("query", "q_proj", "q_conv1d"), ("key", "k_proj", "k_conv1d")):
        flat = getattr(layer, projection)(x).mT
        taps = getattr(layer, convolution).weight
        y = F.silu(F.conv1d(F.pad(flat, (3, 0)), taps, groups=taps.shape[0])).mT
        by_head = y.detach().double().unflatten(-1, (2, -1)).flatten(0, 1)
        expected = torch.einsum("nhc,nhd->hcd", by_head, by_head)
        torch.testing.assert_close(getattr(evidence, f"{role}_gram"), expected, rtol=1e-4, atol=1e-4)
        lengths = by_head.square().sum(-1, keepdim=True).add(1e-6).sqrt()
        longer = torch.cat([by_head / lengths, torch.ones_like(lengths)], dim=-1)
        expected = torch.einsum("nhc,nhd->hcd", longer, longer)
        torch.testing.assert_close(getattr(evidence, f"{role}_moments"), expected, rtol=1e-4, atol=1e-4)
        assert (expected[:, -1, -1] == TOKENS.numel()).all()
    torch.testing.assert_close(evidence.input_square, x.double().square().sum((0, 1)), rtol=1e-4, atol=1e-4)


def test_gradients_are_those_of_the_summed_loss(loaded):
    runtime, mixers = loaded
    evidence = calibrate(runtime, mixers, TOKENS, frozenset({"gradient"}))
    names = [mixer.name_of(slot) for mixer in mixers for slot in (mixer.query, mixer.key)]
    weights = [runtime.model.get_parameter(name).requires_grad_() for name in names]
    logits = runtime.model(input_ids=TOKENS, use_cache=False).logits[:, :-1]
    loss = F.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten(), reduction="sum")
    gradients = [g for m in mixers for g in (evidence[m.layer].query_gradient, evidence[m.layer].key_gradient)]
    for gradient, expected in zip(gradients, torch.autograd.grad(loss, weights), strict=True):
        torch.testing.assert_close(gradient.flatten(0, 1), expected, rtol=1e-3, atol=1e-3)


def test_weighted_grams_count_a_token_by_the_gradient_of_the_loss_there(loaded):
    runtime, mixers = loaded
    evidence = calibrate(runtime, mixers, TOKENS, frozenset({"weighted"}))
    activations = {}

    def record(mixer, role, x):
        activations[mixer.layer, role] = x
        return x

    runtime.model.requires_grad_(True)
    with hooked(runtime.model, mixers, record):
        logits = runtime.model(input_ids=TOKENS, use_cache=False).logits[:, :-1]
    loss = F.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten(), reduction="sum")
    for (layer, role), gradient in zip(activations, torch.autograd.grad(loss, list(activations.values())), strict=True):
        x, weights = activations[layer, role].detach().double(), gradient.double().square().sum(-1)
        expected = torch.einsum("bthc,bth,bthd->hcd", x, weights, x)
        weighted = getattr(evidence[layer], f"{role}_weighted")
        torch.testing.assert_close(weighted, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


@pytest.mark.parametrize("need", sorted(EVERYTHING))
def test_only_what_is_needed_is_collected(loaded, need):
    runtime, mixers = loaded
    evidence = calibrate(runtime, mixers, TOKENS[:2], frozenset({need}))[0]
    assert all(need in name for name, _ in evidence.tensors())


def test_infinite_activations_name_their_layer_and_head(loaded):
    runtime, mixers = loaded
    with torch.no_grad():
        runtime.model.get_parameter(mixers[1].name_of(mixers[1].key))[mixers[1].axis.width].fill_(torch.inf)
    for need in ("gram", "moments"):
        with pytest.raises(ModelError, match="layer 1, head 1: NaN or infinite keys"):
            calibrate(runtime, mixers, TOKENS[:2], frozenset({need}))


def test_evidence_survives_its_file_and_other_models_or_tokens_are_refused(loaded, tmp_path):
    runtime, mixers = loaded
    evidence = calibrate(runtime, mixers, TOKENS[:2], frozenset({"gram", "input"}))
    about = {"data": "x.txt", "samples": 2, "length": 48, "seed": 0, "digest": "d"}
    path = tmp_path / "deep" / "evidence.safetensors"
    EvidenceFile(model="m", calibration=about, evidence=evidence).save(path)
    back = EvidenceFile.open(path)
    for layer in evidence:
        assert back.evidence[layer].tokens == evidence[layer].tokens
        pairs = zip(back.evidence[layer].tensors(), evidence[layer].tensors(), strict=True)
        assert all(torch.equal(a, b) for (_, a), (_, b) in pairs)
    assert back.missing(EVERYTHING | {"weight"}) == {"gradient", "moments", "weighted"}
    back.check(path, "m", "d")
    back.check(path, "m", None)
    with pytest.raises(DataError, match="another model"):
        back.check(path, "n", None)
    with pytest.raises(DataError, match="other tokens"):
        back.check(path, "m", "e")
    assert list(path.parent.iterdir()) == [path]


def test_evidence_of_different_kinds_does_not_merge(loaded):
    runtime, mixers = loaded
    evidence = calibrate(runtime, mixers, TOKENS[:2], frozenset({"gram", "input"}))[0]
    with pytest.raises(DataError, match="different kinds"):
        evidence.merged(replace(evidence, input_square=None))


def test_an_evidence_file_with_a_damaged_description_is_refused(folders, text_file, tmp_path):
    path = tmp_path / "evidence.safetensors"
    options = {"method": "drrqr", "key_dim": 8, "evidence": path, "progress": False}
    slimstate.prune(folders[tiny.PLAIN[0]], data=text_file, samples=2, length=32, **options)
    saved = EvidenceFile.open(path)
    replace(saved, calibration={**saved.calibration, "seed": "three"}).save(path)
    with pytest.raises(DataError, match="is not a slimstate evidence file: seed"):
        slimstate.prune(folders[tiny.PLAIN[0]], **options)
