"""Output projections of mixers whose values were cut are refitted."""

import pytest
import torch

import slimstate
import tiny
from launching import stock_logits
from slimstate import ReconstructOptions
from slimstate.checkpoints.reader import Checkpoint
from slimstate.reconstruction.refit import RIDGE, refit


def test_a_refit_minimises_the_error_with_a_ridge_around_the_cut():
    generator = torch.Generator().manual_seed(0)
    inputs, targets, weight = (torch.randn(*size, generator=generator) for size in ((2, 50, 6), (2, 50, 4), (4, 6)))
    result = refit(weight, [(inputs[:1], targets[:1]), (inputs[1:], targets[1:])])
    rows, expected = inputs.flatten(0, 1).double(), targets.flatten(0, 1).double()
    root = (RIDGE * rows.square().sum(0).mean()).sqrt() * torch.eye(6, dtype=torch.float64)
    system, right = torch.cat([rows, root]), torch.cat([expected, root @ weight.double().mT])
    torch.testing.assert_close(result.double(), torch.linalg.lstsq(system, right).solution.mT, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["delta_net-plain", "qwen3_next-plain", "mamba2-plain", "gla-grouped-keys"])
def test_a_refit_lowers_the_error_without_a_step_and_the_stock_class_loads_it(name, text_file, tmp_path):
    folder = tiny.save(tiny.build(tiny.VARIANTS[name]), tmp_path / "model")
    value_dim, out = Checkpoint.open(folder).mixers[0].value_dim // 2, tmp_path / "out"
    options = ReconstructOptions(steps=0, batch=2, samples=8, length=64)
    cut = slimstate.prune(folder, out, value_dim=value_dim, data=text_file, reconstruct=options)
    assert cut.reconstruction is not None
    for layer in cut.reconstruction.layers:
        assert layer.refit
        assert layer.held_out_after < layer.held_out_before
    assert Checkpoint.open(out).mixers[0].value_dim == value_dim
    torch.save(tiny.token_ids(1, 32), tmp_path / "ids.pt")
    stock_logits(tmp_path / "ids.pt", [out], *([] if name in tiny.OF_FLA else ["--without-fla"]))
