"""Evidence matches its definitions however the tokens are split, and only what is needed is collected."""

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
from slimstate.pruning.calibration import calibrate, draw_rows
from slimstate.system.errors import DataError, ModelError, OutputError

EVERYTHING = frozenset({"gram", "moments", "input", "gradient", "weighted"})
TOKENS = tiny.token_ids(10, 48)
OTHERS = [name for name in tiny.EVERY_PLAIN if name in tiny.OF_TRANSFORMERS]
OTHERS += ["mamba2-biased", "mamba2-no-conv-bias", "mamba2-one-group"]


@pytest.fixture(params=tiny.PLAIN)
def loaded(request, folders):
    folder = folders[request.param]
    return load(folder, device="cpu"), Checkpoint.open(folder).mixers


def close(a, b):
    for (name, x), (other, y) in zip(a.tensors(), b.tensors(), strict=True):
        assert name == other
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4 * float(y.abs().max()))


@pytest.mark.slow
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
    with pytest.raises(DataError, match="must have the same sums"):
        whole[0].merged(replace(whole[0], input_square=None))


def test_an_interrupted_calibration_continues_with_the_same_bits(folders, text_file, tmp_path, monkeypatch):
    """A file of other tokens or precision, or a damaged one, is not continued."""
    monkeypatch.setitem(calibration.TOKENS_AT_ONCE, "cpu", 32)
    monkeypatch.setattr(calibration, "SECONDS_BETWEEN_SAVES", -1)
    options = {"data": text_file, "samples": 4, "length": 32, "key_dim": 8, "method": "grad"}
    model, part = folders[tiny.PLAIN[0]], tmp_path / "cut.calibration"
    whole = slimstate.prune(model, tmp_path / "whole", evidence=tmp_path / "whole.safetensors", **options)
    backward, runs = calibration._backward, []

    def stop_at_the_third(*args):
        if len(runs) == 2:
            raise KeyboardInterrupt
        runs.append(backward(*args))

    monkeypatch.setattr(calibration, "_backward", stop_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        slimstate.prune(model, tmp_path / "cut", evidence=tmp_path / "cut.safetensors", **options)
    stored = part.read_bytes()
    monkeypatch.setattr(calibration, "_backward", lambda *args: runs.append(backward(*args)))
    evidence = {"evidence": tmp_path / "cut.safetensors"}
    for content, changes, count in ((stored, {}, 2), (stored[:-9], {}, 4), (stored, {"seed": 1}, 4)):
        part.write_bytes(content)
        runs.clear()
        evidence["evidence"].unlink(missing_ok=True)
        again = slimstate.prune(model, tmp_path / "cut", force=True, **options, **changes, **evidence)
        assert (len(runs), part.exists()) == (count, False)
        if not changes:
            same, first = (EvidenceFile.open(tmp_path / f"{name}.safetensors").evidence[0] for name in ("cut", "whole"))
            assert all(tensor.equal(dict(first.tensors())[name]) for name, tensor in same.tensors())
            assert again.plan.selections[0].keep.equal(whole.plan.selections[0].keep)


def test_gram_matrices_of_drawn_rows_sum_those_alone(loaded, monkeypatch):
    """Of all rows they are the usual ones; a row more adds one outer product, whatever the batches."""
    runtime, mixers = loaded
    needs, layer = frozenset({"gram"}), mixers[0].layer
    everything = calibrate(runtime, mixers, TOKENS, needs, row_mask=draw_rows(TOKENS, 10**6, 0))
    close(everything[layer], calibrate(runtime, mixers, TOKENS, needs)[layer])
    monkeypatch.setitem(calibration.TOKENS_AT_ONCE, "cpu", 96)
    row_mask = draw_rows(TOKENS, 7, 1)
    assert row_mask.sum() == 7
    evidence = calibrate(runtime, mixers, TOKENS, needs, row_mask=row_mask)[layer]
    ranks = [int(torch.linalg.matrix_rank(gram[0])) for gram in (evidence.query_gram, evidence.key_gram)]
    assert ranks == row_mask.sum((0, 2)).int().tolist()


def activations(checkpoint: Checkpoint, mixer, role: str, x: torch.Tensor) -> torch.Tensor:
    """Compute queries or keys [B, T, H, D] of a mixer's input from its files: projection, filter, SiLU."""

    def rows(parameter: str, start: int, stride: int | None) -> torch.Tensor:
        tensor = checkpoint.read(f"{mixer.place_in_files}.{parameter}").float()
        heads = torch.arange(mixer.axis.heads).unsqueeze(1) * (stride or mixer.axis.width)
        return tensor[start + heads + torch.arange(mixer.axis.width)].flatten(0, 1)

    slot = mixer.query if role == "query" else mixer.key
    stem = f"{mixer.place_in_files}.{slot.parameter.removesuffix('weight')}"
    projected = x @ rows(slot.parameter, slot.start, slot.head_stride).T
    if f"{stem}bias" in checkpoint.tensors:
        projected = projected + rows(slot.parameter.replace("weight", "bias"), slot.start, None)
    (place,) = dict(mixer.filters)[role].slots
    kernel = rows(place.parameter, place.start, None)
    bias = None
    if f"{mixer.place_in_files}.conv1d.bias" in checkpoint.tensors:
        bias = rows("conv1d.bias", place.start, None)
    padded = F.pad(projected.mT, (kernel.shape[-1] - 1, 0))
    filtered = F.conv1d(padded, kernel, bias, groups=len(kernel)).mT
    return F.silu(filtered).unflatten(-1, (mixer.axis.heads, mixer.axis.width))


@pytest.mark.parametrize("name", [*tiny.PLAIN, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_sums_are_those_of_queries_and_keys_as_they_enter_the_state(name, folders):
    checkpoint, runtime = Checkpoint.open(folders[name]), load(folders[name], device="cpu")
    inputs = {}
    for mixer in checkpoint.mixers:
        runtime.model.get_submodule(mixer.path).register_forward_pre_hook(
            lambda _, args, kwargs, layer=mixer.layer: inputs.update({layer: kwargs.get("hidden_states", *args[:1])}),
            with_kwargs=True,
        )
    ids = tiny.token_ids(2, 70)
    evidence = calibrate(runtime, checkpoint.mixers, ids, frozenset({"gram", "moments", "input"}))
    for mixer in checkpoint.mixers:
        sums, x = evidence[mixer.layer], inputs[mixer.layer]
        torch.testing.assert_close(sums.input_square, x.double().square().sum((0, 1)), rtol=1e-4, atol=1e-4)
        for role in ("query", "key"):
            by_head = activations(checkpoint, mixer, role, x).double().flatten(0, 1)
            lengths = by_head.square().sum(-1, keepdim=True).add(1e-6).sqrt()
            unit = torch.cat([by_head / lengths, torch.ones_like(lengths)], dim=-1)
            for kind, vectors in (("gram", by_head), ("moments", unit)):
                expected = torch.einsum("nhc,nhd->hcd", vectors, vectors)
                torch.testing.assert_close(getattr(sums, f"{role}_{kind}"), expected, rtol=1e-3, atol=1e-3)
            assert (getattr(sums, f"{role}_moments")[:, -1, -1] == ids.numel()).all()


@pytest.mark.parametrize("is_folder", [False, True])
def test_what_somebody_else_wrote_there_is_not_replaced(is_folder, folders, text_file, tmp_path):
    place = tmp_path / "cut.calibration"
    place.mkdir() if is_folder else place.write_text("mine")
    options = {"data": text_file, "samples": 2, "length": 32, "key_dim": 8}
    with pytest.raises(OutputError, match="exists and is not an unfinished calibration"):
        slimstate.prune(folders[tiny.PLAIN[0]], tmp_path / "cut", **options)
    assert is_folder or place.read_text() == "mine"
    assert tiny.names(tmp_path) == ["cut.calibration"]


def test_after_an_error_in_a_layer_the_next_pass_starts_at_the_first(loaded):
    runtime, mixers = loaded
    seen = []
    with hooked(runtime.model, mixers, lambda mixer, role, x: seen.append(mixer.layer) or x), torch.no_grad():
        last = runtime.model.get_submodule(mixers[-1].path).register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            runtime.model(input_ids=TOKENS)
        last.remove()
        seen.clear()
        runtime.model(input_ids=TOKENS)
    assert seen == [mixer.layer for mixer in mixers for _ in range(2)]


def test_gradients_and_weighted_grams_are_those_of_the_summed_loss(loaded):
    """A weighted Gram matrix counts a token by the squared gradient of the loss there."""
    runtime, mixers = loaded
    evidence = calibrate(runtime, mixers, TOKENS, frozenset({"gradient", "weighted"}))
    activations = {}

    def record(mixer, role, x):
        activations[mixer.layer, role] = mixer, x
        return x

    runtime.model.requires_grad_(True)
    with hooked(runtime.model, mixers, record):
        logits = runtime.model(input_ids=TOKENS, use_cache=False).logits[:, :-1]
    loss = F.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten(), reduction="sum")
    assert len(activations) == 2 * len(mixers)
    for (layer, role), (mixer, x) in activations.items():
        weight = runtime.model.get_parameter(mixer.name_of(getattr(mixer, role)))
        of_weight, of_x = torch.autograd.grad(loss, [weight, x], retain_graph=True)
        gradient, weighted = (getattr(evidence[layer], f"{role}_{kind}") for kind in ("gradient", "weighted"))
        torch.testing.assert_close(gradient.flatten(0, 1), of_weight, rtol=1e-3, atol=1e-3)
        states, counts = x.detach().double(), of_x.double().square().sum(-1)
        expected = torch.einsum("bthc,bth,bthd->hcd", states, counts, states)
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


def test_evidence_survives_its_file(loaded, tmp_path):
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
    assert list(path.parent.iterdir()) == [path]


def test_an_evidence_file_with_a_damaged_description_is_refused(folders, text_file, tmp_path):
    path = tmp_path / "evidence.safetensors"
    options = {"method": "drrqr", "key_dim": 8, "evidence": path, "progress": False}
    slimstate.prune(folders[tiny.PLAIN[0]], data=text_file, samples=2, length=32, **options)
    saved = EvidenceFile.open(path)
    replace(saved, calibration={**saved.calibration, "seed": "three"}).save(path)
    with pytest.raises(DataError, match="is not a slimstate evidence file: seed"):
        slimstate.prune(folders[tiny.PLAIN[0]], **options)
