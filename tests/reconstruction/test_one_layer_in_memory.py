"""What is in memory while a layer is trained: this layer, once, in the dtype of its files where it is not trained."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

import slimstate
import tiny
from slimstate import LoadOptions, ReconstructOptions
from slimstate.checkpoints.reader import Checkpoint
from slimstate.models import one_layer
from slimstate.models.resting import Resting
from slimstate.reconstruction import walk

QUICK = ReconstructOptions(steps=2, batch=2, samples=4, length=32, learning_rate=3e-3)
SHAPES = {"num_experts": 5, "moe_intermediate_size": 40}
PACKED = {(5, 80, 64), (5, 64, 40)}  # what joins gates and rises of all experts, and what leads down
SINGLE = {(40, 64), (64, 40)}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """With experts in bfloat16."""
    made = tiny.build(tiny.VARIANTS["qwen3_next-plain"], **SHAPES).to(torch.bfloat16)
    return tiny.save(made, tmp_path_factory.mktemp("experts") / "model", "20KB")


def reconstructed(model: Path, out: Path, text_file: Path, **run: str) -> dict[str, bytes]:
    slimstate.prune(
        model, out, method="l1", key_dim=8, data=str(text_file), reconstruct=QUICK,
        run=LoadOptions(device="cpu", **run),
    )  # fmt: skip
    return {path.name: path.read_bytes() for path in sorted(out.glob("*.safetensors"))}


def live(shapes: set[tuple[int, ...]]) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of tensors of these shapes, each piece of memory once."""
    gc.collect()
    found = {}
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor) and tuple(each.shape) in shapes and not each.is_meta:
            tensor = each._kept if isinstance(each, Resting) else each
            found[tensor.data_ptr()] = tuple(tensor.shape), tensor.dtype
    return sorted(found.values())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_tensor_of_a_layer_is_there_twice_and_none_of_the_layer_before(
    dtype, model, text_file, tmp_path, monkeypatch
):
    fitted, seen = walk.fit, []

    def looking(task, *others):
        seen.append((live(PACKED), live(SINGLE)))
        return fitted(task, *others)

    monkeypatch.setattr(walk, "fit", looking)
    reconstructed(model, tmp_path / "out", text_file, dtype=dtype)
    once = [(shape, torch.bfloat16) for shape in sorted(PACKED)]
    assert seen == 2 * [(once, [])]


@pytest.mark.slow
def test_experts_at_rest_give_the_same_bytes_as_copies_in_float32(model, text_file, tmp_path, monkeypatch):
    rested = reconstructed(model, tmp_path / "rested", text_file)
    monkeypatch.setattr(one_layer, "NARROWER", ())
    assert reconstructed(model, tmp_path / "copied", text_file) == rested


@pytest.mark.slow
def test_a_run_that_was_stopped_shares_the_experts_of_the_layers_it_finds_done(model, text_file, tmp_path, monkeypatch):
    """Of such a layer the norm is another, too, which lies beside the mixer."""
    whole = reconstructed(model, tmp_path / "whole", text_file)
    fitted, advance, seen = walk.fit, walk.Walk._advance, []

    def stopping(task, settings, layer, step):
        if layer:
            raise KeyboardInterrupt
        return fitted(task, settings, layer, step)

    def looking(self, stream, number):
        seen.append(len(live(PACKED)))
        return advance(self, stream, number)

    monkeypatch.setattr(walk, "fit", stopping)
    with pytest.raises(KeyboardInterrupt):
        reconstructed(model, tmp_path / "stopped", text_file)
    monkeypatch.setattr(walk, "fit", fitted)
    monkeypatch.setattr(walk.Walk, "_advance", looking)
    assert reconstructed(model, tmp_path / "stopped", text_file) == whole
    assert set(seen) == {2}


def test_rows_read_alone_are_those_of_the_whole_tensor(model):
    checkpoint = Checkpoint.open(model)
    name = next(name for name in checkpoint.tensors if "embed_tokens" in name)
    numbers = torch.tensor([0, 3, 200, 257])
    stored = checkpoint.stored(name)
    assert (stored.shape, stored.dtype) == (checkpoint.read(name).shape, torch.bfloat16)
    assert torch.equal(stored.rows(numbers), checkpoint.read(name)[numbers])
