"""While a layer is trained, memory holds only this layer, once, and in the dtype of its files where it is frozen."""

import gc
from pathlib import Path

import pytest
import torch

import slimstate
import tiny
from slimstate import ReconstructOptions
from slimstate.models import one_layer
from slimstate.models.compact_weights import CompactWeight
from slimstate.reconstruction import rates, walk

QUICK = ReconstructOptions(steps=2, batch=2, samples=4, length=32, learning_rate=3e-3)
SHAPES = {"num_experts": 5, "moe_intermediate_size": 40}
PACKED = {(5, 80, 64), (5, 64, 40)}  # the joined gate and up projections of all experts, and their down projections
SINGLE = {(40, 64), (64, 40)}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """With experts in bfloat16."""
    experts = tiny.build(tiny.VARIANTS["qwen3_next-plain"], **SHAPES).to(torch.bfloat16)
    return tiny.save(experts, tmp_path_factory.mktemp("experts") / "model", "20KB")


def reconstruct(model: Path, out: Path, text_file: Path, **options: str) -> dict[str, bytes]:
    """Return the bytes of the weights of a reconstructed cut, by file."""
    slimstate.prune(model, out, method="l1", key_dim=8, data=text_file, reconstruct=QUICK, device="cpu", **options)
    return {path.name: path.read_bytes() for path in sorted(out.glob("*.safetensors"))}


def tensors_in_memory(shapes: set[tuple[int, ...]]) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return shapes and dtypes of all tensors of these shapes, each piece of memory once."""
    gc.collect()
    tensors = {}
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor) and tuple(each.shape) in shapes and not each.is_meta:
            tensor = each.stored if isinstance(each, CompactWeight) else each
            tensors[tensor.data_ptr()] = tuple(tensor.shape), tensor.dtype
    return sorted(tensors.values())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_tensor_of_a_layer_is_held_twice_nor_one_of_the_layer_before(dtype, model, text_file, tmp_path, monkeypatch):
    original, observed = rates.fit, []

    def observe(task, *others):
        observed.append((tensors_in_memory(PACKED), tensors_in_memory(SINGLE)))
        return original(task, *others)

    monkeypatch.setattr(rates, "fit", observe)
    reconstruct(model, tmp_path / "out", text_file, dtype=dtype)
    once = [(shape, torch.bfloat16) for shape in sorted(PACKED)]
    assert observed == 2 * [(once, [])]


@pytest.mark.slow
def test_experts_copied_to_float32_and_a_continued_run_give_the_same_bytes(model, text_file, tmp_path, monkeypatch):
    """A continued run shares the experts of finished layers, whose trained norm, beside the mixer, differs too."""
    whole = reconstruct(model, tmp_path / "whole", text_file)
    with monkeypatch.context() as patch:
        patch.setattr(one_layer, "HALF", ())
        assert reconstruct(model, tmp_path / "copied", text_file) == whole
    original, advance, observed = rates.fit, walk.Walk._advance, []

    def interrupted_fit(task, settings, layer, rate, step):
        if layer:
            raise KeyboardInterrupt
        return original(task, settings, layer, rate, step)

    def observe(self, stream, number):
        observed.append(len(tensors_in_memory(PACKED)))
        return advance(self, stream, number)

    monkeypatch.setattr(rates, "fit", interrupted_fit)
    with pytest.raises(KeyboardInterrupt):
        reconstruct(model, tmp_path / "stopped", text_file)
    monkeypatch.setattr(rates, "fit", original)
    monkeypatch.setattr(walk.Walk, "_advance", observe)
    assert reconstruct(model, tmp_path / "stopped", text_file) == whole
    assert set(observed) == {2}
