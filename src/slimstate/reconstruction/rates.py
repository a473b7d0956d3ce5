"""Train layers at learning rates that fit them: by their width as a start, then by a trial on held-out windows.

Layers are of one kind if the tensors of their mixers have the same shapes. The first of a kind that is trained tries a
few rates for all of them: first, first / 4, and then first / 16 if that was better, else first x 4. A short trial
favours high rates, so lower ones follow where the training did not go on to improve. Each attempt starts from the cut,
and the weights with the lowest error on held-out windows count.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from slimstate.checkpoints.reader import Checkpoint
from slimstate.models.speed import WITH_GRADIENT
from slimstate.reconstruction.fit import Task, fit
from slimstate.records.parts import ReconstructionSettings
from slimstate.records.training import MARGIN, OVERFIT, LayerErrors, RateTrial
from slimstate.system.progress import Reporter

RATE, WIDTH = 2e-3, 512  # the best rate for layers of this width
FACTOR, SMALL_FACTOR = 4, 2  # between two rates of a trial, and to one that is hardly too high
RATES = 3  # in a trial
MAX_SHARE = 0.15  # of the steps of all layers of a kind, for the trial
MIN_STEPS = 20  # of a trial at one rate
MIN_GAIN = 0.05  # by which the error of a whole training must be lower than that of the trial
RETRIES = 2  # at lower rates
NEGLIGIBLE = 1e-5  # error below which a layer is not trained, about that of rounding its weights to bfloat16


@dataclass(frozen=True)
class Rates:
    """The learning rates of a reconstruction: the one that the settings name, or one for each kind of layer."""

    settings: ReconstructionSettings
    kinds: Mapping[int, Hashable]  # by layer
    first: Mapping[int, float]  # the rate to start from, by layer
    step_tokens: float
    reporter: Reporter
    chosen: dict[Hashable, float] = field(default_factory=dict)  # by kind

    @classmethod
    def of(cls, teacher: Checkpoint, settings: ReconstructionSettings, reporter: Reporter) -> "Rates":
        """Return the rates for the mixers of an uncut model."""
        kinds: dict[int, Hashable] = {}
        for mixer in teacher.mixers:
            names = [name for name in teacher.tensors if name.startswith(f"{mixer.place_in_files}.")]
            kinds[mixer.layer] = tuple(sorted(teacher.tensors[name].shape for name in names))
        first = {mixer.layer: RATE * min(1.0, WIDTH / mixer.input_size) for mixer in teacher.mixers}
        return cls(settings, kinds, first, step_tokens(teacher, settings), reporter)

    def remember(self, errors: LayerErrors) -> None:
        """Take over the choice of an earlier run from a layer that it has finished."""
        if errors.chosen_rate is not None:
            self.chosen[self.kinds[errors.layer]] = errors.chosen_rate

    def trial_steps(self, layer: int) -> int:
        """Return the steps of a trial at each rate: all of them where so many layers follow that it costs little."""
        kind, steps = self.kinds[layer], self.settings.steps
        layers = sum(other == kind for number, other in self.kinds.items() if number >= layer)
        if MAX_SHARE * layers >= RATES - 1:  # one of the trials is the training
            return steps
        return min(steps, max(MIN_STEPS, round(MAX_SHARE * layers * steps / RATES)))

    def fit(self, task: Task, layer: int) -> LayerErrors:
        """Train a layer, leave the best weights in it, and return the errors before and after."""
        settings, kind = self.settings, self.kinds[layer]
        named, steps = settings.learning_rate, settings.steps
        if named is not None or not steps:
            return self._train(task, layer, self.first[layer] if named is None else named, steps)
        if task.measure(task.held_out) < NEGLIGIBLE:
            errors = fit(task, replace(settings, steps=0), layer, self.first[layer], lambda step, loss: None)
            return replace(errors, negligible=True)
        attempts = Attempts(task, partial(self._train, task, layer))
        is_first = kind not in self.chosen
        rate = self._try_rates(attempts, layer) if is_first else self.chosen[kind]
        if (rate, steps) not in attempts.errors:
            attempts.add(rate, steps)
        for _ in range(RETRIES):
            best, is_useless = attempts.best_rate(steps), not attempts.best.step
            lower = best / (FACTOR if is_useless else SMALL_FACTOR)
            too_high = is_useless or (is_first and self._is_too_high(attempts, layer, best))
            if not too_high or (lower, steps) in attempts.errors:
                break
            attempts.add(lower, steps)
        short = min(steps, max(MIN_STEPS, round(MAX_SHARE * steps)))
        if not is_first and short < steps and attempts.best.held_out_after > OVERFIT * attempts.best.after:
            attempts.add(rate * FACTOR, short)
        if is_first:
            self.chosen[kind] = rate = attempts.best_rate(steps, rate)
        task.load(attempts.weights)
        errors = replace(attempts.best, trial=attempts.trials if is_first else (), chosen_rate=rate)
        if is_first:
            self.reporter.say(errors.rates)
        return errors

    def _try_rates(self, attempts: "Attempts", layer: int) -> float:
        """Return the best rate after a few steps."""
        first, steps = self.first[layer], self.trial_steps(layer)
        higher, lower = attempts.add(first, steps), attempts.add(first / FACTOR, steps)
        attempts.add(first / FACTOR**2 if lower < higher else first * FACTOR, steps)
        return attempts.best_rate(steps, first)

    def _is_too_high(self, attempts: "Attempts", layer: int, rate: float) -> bool:
        """Return whether a lower rate may be better: half of the steps, or all but those of the trial, were no use."""
        steps, short = self.settings.steps, self.trial_steps(layer)
        errors, trial = attempts.errors[rate, steps], attempts.errors.get((rate, short)) if short < steps else None
        hardly_lower = trial is not None and errors.held_out_after > (1 - MIN_GAIN) * trial.held_out_after
        return errors.step <= steps // 2 or hardly_lower

    def _train(self, task: Task, layer: int, rate: float, steps: int) -> LayerErrors:
        settings, later = replace(self.settings, steps=steps), sum(other > layer for other in self.kinds)
        label, later = f"layer {layer} at rate {rate:g}", later * self.settings.steps
        with self.reporter.meter(label, steps, later, self.step_tokens) as meter:
            return fit(task, settings, layer, rate, lambda step, loss: meter(step, f"error {loss:.4f}"))


def step_tokens(model: Checkpoint, settings: ReconstructionSettings) -> float:
    """Return the cost of a step, in tokens once forward through the whole model."""
    layers = int(model.language_config.get("num_hidden_layers", len(model.mixers)))
    return WITH_GRADIENT * settings.batch * settings.length / layers


def reconstruction_tokens(model: Checkpoint, settings: ReconstructionSettings) -> float:
    """Return the cost of a whole reconstruction: steps, trials, and a pass through both models."""
    steps = (1 + MAX_SHARE) * settings.steps * len(model.mixers)
    return steps * step_tokens(model, settings) + 2 * settings.samples * settings.length


class Attempts:
    """Trainings of one layer from the weights of its cut; `train` takes a rate and a number of steps."""

    def __init__(self, task: Task, train: Callable[[float, int], LayerErrors]) -> None:
        self.task, self.train = task, train
        self.cut = self.weights = task.copy()  # the latter are the best so far
        self.errors: dict[tuple[float, int], LayerErrors] = {}  # by rate and steps

    @property
    def best(self) -> LayerErrors:
        return min(self.errors.values(), key=lambda errors: errors.held_out_after)

    @property
    def trials(self) -> tuple[RateTrial, ...]:
        return tuple(
            RateTrial(learning_rate=rate, steps=steps, held_out=errors.held_out_after)
            for (rate, steps), errors in self.errors.items()
        )

    def best_rate(self, steps: int, other: float | None = None) -> float:
        """Return the rate with the lowest error after these steps, or another one if that is hardly worse."""
        errors = {rate: each.held_out_after for (rate, count), each in self.errors.items() if count == steps}
        best = min(errors, key=lambda rate: (errors[rate], rate))
        return best if other is None or errors[best] < (1 - MARGIN) * errors[other] else other

    def add(self, rate: float, steps: int) -> float:
        """Train the layer and return its error on held-out windows."""
        self.task.load(self.cut)
        errors = self.errors[rate, steps] = self.train(rate, steps)
        if self.best is errors:
            self.weights = self.task.copy()
        return errors.held_out_after
