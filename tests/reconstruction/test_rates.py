"""The learning rate of a reconstruction fits the layer: by its width, and by a trial on held-out windows."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from slimstate.reconstruction import rates
from slimstate.reconstruction.options import count_held_out
from slimstate.reconstruction.rates import Rates
from slimstate.records.training import LayerErrors, ReconstructionSettings
from slimstate.system.progress import SILENT

SETTINGS = ReconstructionSettings(steps=500, batch=16, samples=640, length=1024, learning_rate=None, seed=0)


class Layers:
    """Layers of one kind whose error is lowest at a rate; `task` has the rate of the weights that are in the layer."""

    def __init__(self, monkeypatch, *, count=8, width=512, settings=SETTINGS):
        self.runs: list[tuple[int, float, int]] = []
        self.best, self.curve, self.highest, self.weights = 2e-3, 0.1, math.inf, 0.0
        self.of_cut = 1.0  # the error before
        self.short = 1.2  # times the error of a whole training
        self.training = 1.0  # error on windows that were trained on, times that on others
        self.stable = math.inf  # above this rate the error is lowest after a quarter of the steps, and higher than that
        self.task = SimpleNamespace(
            copy=lambda: self.weights, load=lambda weights: setattr(self, "weights", weights), held_out=(),
            measure=lambda windows: self.of_cut,
        )  # fmt: skip
        mixers = [SimpleNamespace(layer=layer, place_in_files=f"{layer}", input_size=width) for layer in range(count)]
        tensors = {f"{layer}.key.weight": SimpleNamespace(shape=(4, width)) for layer in range(count)}
        teacher = SimpleNamespace(mixers=mixers, tensors=tensors, language_config={})
        self.rates = Rates.of(teacher, settings, SILENT)
        monkeypatch.setattr(rates, "fit", self.fit)

    def fit(self, task, settings, layer, rate, on_step):
        assert self.weights == 0.0, "every rate starts from the cut"
        self.runs.append((layer, rate, settings.steps))
        error = min(1.0, 0.5 + self.curve * abs(math.log2(rate / self.best))) if rate <= self.highest else 1.0
        error *= 1.0 if settings.steps == SETTINGS.steps or error == 1.0 else self.short
        is_stable = rate <= self.stable or settings.steps < SETTINGS.steps
        error, last = (error, settings.steps) if is_stable else (min(1.0, error + 0.4), settings.steps // 4)
        self.weights = rate if error < 1.0 else 0.0
        step = last if error < 1.0 else 0
        error, step = (error, step) if settings.steps else (self.of_cut, 0)
        errors = {"before": self.of_cut, "after": self.training * error, "held_out_before": self.of_cut}
        return LayerErrors(layer=layer, held_out_after=error, step=step, learning_rate=rate, **errors)

    def train(self, layer):
        self.weights = 0.0
        return self.rates.fit(self.task, layer)


@pytest.mark.parametrize(
    ("width", "best", "tried", "chosen"),
    [
        (512, 2e-3, (2e-3, 5e-4, 8e-3), 2e-3),
        (256, 8e-3, (2e-3, 5e-4, 8e-3), 8e-3),
        (512, 5e-4, (2e-3, 5e-4, 1.25e-4), 5e-4),
        (512, 1e-4, (2e-3, 5e-4, 1.25e-4), 1.25e-4),
        (2048, 5e-4, (5e-4, 1.25e-4, 2e-3), 5e-4),
        (4096, 5e-5, (2.5e-4, 6.25e-5, 1.5625e-5), 6.25e-5),
    ],
)
def test_the_first_layer_of_a_kind_tries_three_rates_around_that_of_its_width(width, best, tried, chosen, monkeypatch):
    layers = Layers(monkeypatch, width=width)
    layers.best = best
    first, second = layers.train(0), layers.train(1)
    assert layers.runs == [*((0, rate, 200) for rate in tried), (0, chosen, 500), (1, chosen, 500)]
    assert [trial.learning_rate for trial in first.trial] == [*tried, chosen]
    assert (first.chosen_rate, second.chosen_rate, second.trial) == (chosen, chosen, ())
    assert layers.weights == second.learning_rate == chosen


def test_a_rate_that_is_hardly_better_than_that_of_the_width_is_not_chosen_but_its_weights_count(monkeypatch):
    layers = Layers(monkeypatch, count=20)
    layers.best, layers.curve = 5e-4, 0.004
    errors = layers.train(0)
    assert [steps for _, _, steps in layers.runs] == [500, 500, 500], "with many layers a trial is a whole training"
    assert (errors.chosen_rate, errors.learning_rate, layers.weights) == (2e-3, 5e-4, 5e-4)
    own, others = errors.rates.split("; ")
    assert own.startswith("learning rate 0.0005 was best at layer 0 of 0.002 (")
    assert "0.002" in others
    assert "2% better" in others
    useless = replace(errors, learning_rate=None, step=0)
    assert useless.rates.startswith("no learning rate helped at layer 0 of 0.002 (")
    assert useless.rates.endswith("other layers of its kind start with 0.002")


def test_a_rate_at_which_the_error_rises_before_the_end_is_lowered_for_all_layers(monkeypatch):
    layers = Layers(monkeypatch)
    layers.stable, layers.short = 1e-3, 1.1
    first = layers.train(0)
    assert layers.runs[3:] == [(0, 2e-3, 500), (0, 1e-3, 500)]
    assert (first.chosen_rate, len(first.trial)) == (1e-3, 5)
    assert first.learning_rate == layers.weights == 2e-3, "of the short trial, whose error was the lowest"
    layers.train(1)
    assert layers.runs[5:] == [(1, 1e-3, 500)]


def test_a_rate_at_which_most_steps_bring_nothing_is_lowered(monkeypatch):
    layers = Layers(monkeypatch)
    layers.short, layers.curve = 1.0, 0.001
    layers.train(0)
    assert layers.runs[3:] == [(0, 2e-3, 500), (0, 1e-3, 500)]
    assert layers.rates.chosen == {layers.rates.kinds[0]: 2e-3}, "the lower one was no better"


def test_a_layer_that_learns_its_windows_by_heart_is_trained_for_few_steps_at_a_higher_rate_too(monkeypatch):
    layers = Layers(monkeypatch)
    layers.train(0)
    layers.best, layers.training = 8e-3, 0.1
    errors = layers.train(1)
    assert layers.runs[4:] == [(1, 2e-3, 500), (1, 8e-3, 75)]
    assert (errors.learning_rate, errors.chosen_rate, layers.weights) == (8e-3, 2e-3, 8e-3)


def test_a_layer_that_the_rate_does_not_improve_is_trained_at_lower_ones_before_the_cut_stays(monkeypatch):
    layers = Layers(monkeypatch)
    layers.train(0)
    layers.highest = 2e-4
    assert (layers.train(1).learning_rate, layers.weights) == (1.25e-4, 1.25e-4)
    layers.highest = 0.0
    assert (layers.train(2).step, layers.weights) == (0, 0.0)
    assert layers.rates.chosen == {layers.rates.kinds[0]: 2e-3}


@pytest.mark.parametrize("settings", [replace(SETTINGS, learning_rate=1e-3), replace(SETTINGS, steps=0)])
def test_a_rate_that_the_user_names_is_used_as_it_is(settings, monkeypatch):
    layers = Layers(monkeypatch, settings=settings)
    layers.highest = 0.0
    assert layers.train(0).trial == ()
    assert layers.runs == [(0, settings.learning_rate or 2e-3, settings.steps)]


def test_a_run_that_continues_has_the_choice_of_the_first(monkeypatch):
    before = Layers(monkeypatch)
    before.best = 5e-4
    errors, after = before.train(0), Layers(monkeypatch)
    after.rates.remember(errors)
    after.train(3)
    assert after.runs == [(3, 5e-4, 500)]


@pytest.mark.parametrize("layers", [1, 4, 8, 13, 14, 36])
def test_a_trial_takes_at_most_15_percent_of_the_steps_or_20_steps_for_each_rate(layers, monkeypatch):
    before = Layers(monkeypatch, count=layers)
    before.train(0)
    more = sum(steps for _, _, steps in before.runs) - SETTINGS.steps
    assert more <= max(0.15 * layers * SETTINGS.steps, 3 * rates.MIN_STEPS)


@pytest.mark.parametrize(("windows", "held_out"), [(2, 1), (40, 4), (320, 32), (640, 32)])
def test_a_tenth_of_the_windows_is_held_out_but_32_at_most(windows, held_out):
    assert count_held_out(windows) == held_out


@pytest.mark.parametrize(("error", "runs"), [(2e-5, 500), (5e-6, 0)])
def test_a_layer_that_hardly_differs_is_not_trained(monkeypatch, error, runs):
    layers = Layers(monkeypatch, count=2)
    layers.of_cut, layers.curve = error, 0.0
    errors = layers.train(0)
    assert max(steps for _, _, steps in layers.runs) == runs
    assert errors.improved == bool(runs)
    assert (errors.chosen_rate is None) == (not runs)
    assert errors.negligible == (not runs)
    layers.of_cut = 1.0
    assert layers.train(1).chosen_rate is not None, "the next layer of its kind tries the rates"
