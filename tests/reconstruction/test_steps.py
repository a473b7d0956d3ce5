"""Steps of training: those of Adam, recorded as CUDA graphs or not."""

import pytest
import torch

from slimstate.reconstruction.fit import CapturedSteps, Steps, steps_of
from slimstate.reconstruction.trained_layers import TrainedLayers

STEPS = 12


def problem(device):
    generator = torch.Generator().manual_seed(0)
    inputs, targets = (torch.randn(32, 5, 4, generator=generator).to(device) for _ in range(2))
    weight = torch.nn.Parameter(torch.randn(4, 4, generator=generator).to(device))

    def errors(windows):
        for piece in windows.split(3):
            yield (inputs[piece] @ weight - targets[piece]).square().sum()

    return weight, errors


def train(steps, weight):
    order = torch.Generator().manual_seed(1)
    rates = (0.1 / number for number in range(1, STEPS + 1))
    losses = [float(steps.take(torch.randperm(32, generator=order)[:8], rate)) for rate in rates]
    return weight.detach().cpu(), losses


@pytest.mark.parametrize(("count", "second_beta"), [(500, 0.99), (80, 0.9375), (STEPS, 0.9)])
def test_steps_are_those_of_adam_on_the_mean_error(count, second_beta):
    weight, errors = problem("cpu")
    other, errors_of_other = problem("cpu")
    after, losses = train(steps_of([weight], errors, 2.0, count, capturable=True), weight)
    adam, order = torch.optim.Adam([other], betas=(0.9, second_beta)), torch.Generator().manual_seed(1)
    for number in range(1, STEPS + 1):
        adam.param_groups[0]["lr"] = 0.1 / number
        adam.zero_grad()
        loss = sum(errors_of_other(torch.randperm(32, generator=order)[:8])) / 16
        loss.backward()
        adam.step()
    torch.testing.assert_close(after, other.detach())
    assert losses[-1] == pytest.approx(float(loss))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="records on a GPU")
@pytest.mark.parametrize("synchronizes", [False, True])
def test_recorded_steps_are_those_that_were_launched_one_by_one(synchronizes):
    weight, errors = problem("cuda")
    other, errors_of_other = problem("cuda")

    def other_errors(windows):
        for piece in errors_of_other(windows):
            if synchronizes:  # which cannot be recorded
                float(piece)
            yield piece

    steps = CapturedSteps([other], other_errors, 2.0, STEPS)
    after, losses = train(steps, other)
    expected, expected_losses = train(Steps([weight], errors, 2.0, STEPS), weight)
    assert (steps.graph is None) is synchronizes
    torch.testing.assert_close(after, expected)
    assert losses == pytest.approx(expected_losses, rel=1e-4)


def test_an_interrupted_run_says_how_to_continue_it(tmp_path):
    folder = TrainedLayers(tmp_path)
    assert folder.describe() == "no layer is done yet; the same command starts again with the first"
    for layer, words in ((0, "1 layer is kept"), (3, "2 layers are kept")):
        (tmp_path / f"layer-{layer}.json").write_text("{}")
        assert folder.describe() == f"{words} in {tmp_path}; the same command continues there"
    (tmp_path / "layer-4.safetensors").touch()
    assert folder.describe().startswith("2 layers"), "a layer without its errors is not done"
