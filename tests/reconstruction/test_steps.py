"""A step that is recorded is the step that it was recorded from."""

from __future__ import annotations

import pytest
import torch

from slimstate.reconstruction.steps import CapturedSteps, Steps, steps_of
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


def trained(steps, weight):
    order = torch.Generator().manual_seed(1)
    told = [float(steps.take(torch.randperm(32, generator=order)[:8], 0.1 / number)) for number in range(1, STEPS + 1)]
    return weight.detach().cpu(), told


@pytest.mark.parametrize(("count", "second_beta"), [(500, 0.99), (80, 0.9375), (STEPS, 0.9)])
def test_steps_are_those_of_adam_on_the_mean_error(count, second_beta):
    weight, errors = problem("cpu")
    other, errors_of_other = problem("cpu")
    after, told = trained(steps_of([weight], errors, 2.0, count, recordable=True), weight)
    adam, order = torch.optim.Adam([other], betas=(0.9, second_beta)), torch.Generator().manual_seed(1)
    for number in range(1, STEPS + 1):
        adam.param_groups[0]["lr"] = 0.1 / number
        adam.zero_grad()
        loss = sum(errors_of_other(torch.randperm(32, generator=order)[:8])) / 16
        loss.backward()
        adam.step()
    torch.testing.assert_close(after, other.detach())
    assert told[-1] == pytest.approx(float(loss))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="records on a GPU")
@pytest.mark.parametrize("asks", [False, True])
def test_recorded_steps_are_those_that_were_launched_one_by_one(asks):
    weight, errors = problem("cuda")
    other, errors_of_other = problem("cuda")

    def asking(windows):
        for piece in errors_of_other(windows):
            if asks:  # which no recording can do
                float(piece)
            yield piece

    steps = CapturedSteps([other], asking, 2.0, STEPS)
    found, wanted = trained(steps, other), trained(Steps([weight], errors, 2.0, STEPS), weight)
    assert (steps.graph is None) is asks
    torch.testing.assert_close(found[0], wanted[0])
    assert found[1] == pytest.approx(wanted[1], rel=1e-4)


def test_a_stop_tells_how_to_go_on_from_the_first_layer_on(tmp_path):
    folder = TrainedLayers(tmp_path)
    assert folder.describe() == "no layer is done yet; the same command starts again with the first"
    for layer, words in ((0, "1 layer is kept"), (3, "2 layers are kept")):
        (tmp_path / f"layer-{layer}.json").write_text("{}")
        assert folder.describe() == f"{words} in {tmp_path}; the same command continues there"
    (tmp_path / "layer-4.safetensors").touch()
    assert folder.describe().startswith("2 layers"), "a layer without its errors is not done"
