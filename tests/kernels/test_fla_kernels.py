"""The PyTorch form of every family of fla computes what fla's own kernels do, which Triton's interpreter runs here."""

import subprocess
import sys

import pytest
import torch

import tiny
from places import TESTS
from slimstate.models.load import load

pytestmark = pytest.mark.slow
NAMES = [name for name in tiny.OF_FLA if name in tiny.EVERY_PLAIN]
SEQUENCES = [tiny.token_ids(1, length) for length in (6, 66)]  # all in one go; long ones are done in chunks


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Models of one layer: the interpreter is slow."""
    place = tmp_path_factory.mktemp("models")
    shallow = {name: tiny.build(tiny.VARIANTS[name], num_hidden_layers=1) for name in NAMES}
    return {name: tiny.save(model, place / name, "100KB") for name, model in shallow.items()}


@pytest.fixture(scope="module")
def interpreted(models, tmp_path_factory):
    place, script = tmp_path_factory.mktemp("interpreted"), TESTS / "interpret_fla.py"
    torch.save(SEQUENCES, place / "ids.pt")
    command = [sys.executable, script, place / "ids.pt", place / "results.pt", *models.values()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return torch.load(place / "results.pt")


@pytest.mark.parametrize("name", NAMES)
def test_a_model_has_the_logits_that_the_kernels_of_fla_make(name, models, interpreted):
    model = load(models[name], device="cpu").model
    for ids, expected in zip(SEQUENCES, interpreted["logits"][name], strict=True):
        with torch.inference_mode():
            first = model(input_ids=ids[:, :-1], use_cache=True)
            last = model(input_ids=ids[:, -1:], past_key_values=first.past_key_values, use_cache=True)
        logits = torch.cat([first.logits, last.logits], dim=1)
        # MesaNet rounds queries and keys to float16, and between chunks states to bfloat16, which are not interpreted
        tolerance, tokens = (6e-3, 64) if name.startswith("mesa_net") else (3e-5, None)
        tolerance *= float(logits.std())
        torch.testing.assert_close(logits[:, :tokens], expected[:, :tokens], rtol=0, atol=tolerance)


def test_with_our_step_backward_passes_of_gated_rules_through_kernels_of_fla_are_those_of_pytorch(interpreted):
    """The step is the one that fla refuses on Hopper with Triton 3.4 to 3.7.0."""
    assert max(interpreted["differences"].values()) < 2e-5
