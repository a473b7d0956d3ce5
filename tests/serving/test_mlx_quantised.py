"""Cutting and quantising commute in mlx-lm, tensor by tensor, and a quantised cut computes what its mask computes.

`make engines-mlx` creates its environment and sets SLIMSTATE_MLX_PYTHON to its interpreter.
"""

import subprocess

import engine_models
import pytest
import torch

import slimstate
import tiny

PYTHON, pytestmark = engine_models.interpreter("mlx")
MODES = {
    "4 bit": ("--q-bits", "4", "--q-group-size", "32"),
    "8 bit": ("--q-bits", "8", "--q-group-size", "64"),
    "mxfp4": ("--q-mode", "mxfp4"),
    "nvfp4": ("--q-mode", "nvfp4"),
}
WIDTHS = (64, 96, 80)
CASES = [(name, mode) for name in ("qwen3_next", "qwen3_5") for mode in MODES]
CASES += [("granitemoehybrid", "4 bit"), ("nemotron_h", "nvfp4")]
ENGINE = {"engine": "mlx", "python": PYTHON, "device": "cpu", "progress": False}
OPTIONS = {**ENGINE, "samples": 2, "length": 32, "tokens": 4}


def convert(model, mode: str):
    out = model.with_name(f"{model.name}-{mode.replace(' ', '')}")
    words = (PYTHON, "-m", "mlx_lm", "convert", "--hf-path", model, "--mlx-path", out, "-q", *MODES[mode])
    subprocess.run(words, check=True, capture_output=True)
    return out


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_cutting_and_quantising_commute(name, mode, tmp_path):
    model = engine_models.uncut(name, tmp_path / "model")
    quantised = convert(model, mode)
    for width in WIDTHS:
        cut = engine_models.cut(model, width)
        both = tmp_path / f"quantised-{width}"
        slimstate.prune(quantised, both, apply=cut, same_model=True, progress=False)
        first, second = tiny.read_tensors(convert(cut, mode)), tiny.read_tensors(both)
        assert first.keys() == second.keys()
        for each, tensor in first.items():
            assert (tensor.dtype, tensor.shape) == (second[each].dtype, second[each].shape), each
            assert torch.equal(*(part.flatten().view(torch.uint8) for part in (tensor, second[each]))), each
    record = slimstate.verify(both, **OPTIONS, against=str(quantised), masked=True, tolerance=1e-4)
    assert record.outcome.verdict == "agrees", record.verdict


def test_another_mask_differs(tmp_path):
    model = engine_models.uncut("qwen3_next", tmp_path / "model")
    quantised, cut = convert(model, "4 bit"), engine_models.cut(model, 64)
    slimstate.prune(model, tmp_path / "random", method="random", key_dim=64, progress=False)
    options = {**OPTIONS, "against": str(quantised), "masked": True, "plan": tmp_path / "random"}
    assert slimstate.verify(convert(cut, "4 bit"), **options).outcome.verdict == "differs"
