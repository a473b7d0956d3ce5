"""Report the speed of a training and, once some steps were timed, how long the rest will take."""

import time
from collections.abc import Callable
from datetime import timedelta

import torch

from slimstate.records.numbers import plural
from slimstate.system.progress import Reporter, Update
from slimstate.training.options import TrainOptions

COMPILING_STEPS = 2  # at the start, in which kernels are compiled; they are not timed
TIMED_STEPS, TIMED_SECONDS = 3, 2.0  # at least, before the time of the rest is announced


class TrainingProgress:
    """Time the steps of a training; `update` shows the loss and the speed, `reporter` the time that is left."""

    def __init__(
        self, options: TrainOptions, update: Update, reporter: Reporter, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.total, self.tokens_per_step, self.device = options.total_steps, options.tokens_per_step, options.run.place
        self.update, self.reporter, self.clock = update, reporter, clock
        self.first = self.timed_from = 0  # steps done
        self.started, self.is_announced = 0.0, False

    def begin(self, done: int) -> None:
        """Start after this many steps of an earlier run."""
        self.first = self.timed_from = done
        self.started = self._now()

    def end_step(self, done: int) -> None:
        """Count a step, and announce the time of the rest once."""
        steps = done - self.timed_from
        if done <= self.first + COMPILING_STEPS:
            self.timed_from, self.started = done, self._now()
        elif not self.is_announced and steps >= TIMED_STEPS and (seconds := self._now() - self.started) > TIMED_SECONDS:
            self.is_announced = True
            if left := self.total - done:
                duration = timedelta(seconds=round(seconds / steps * left))
                self.reporter.say(f"the remaining {plural(left, 'step')} will take about {duration}")

    def log(self, done: int, loss: float) -> None:
        """Show the loss and the speed."""
        steps, seconds = done - self.timed_from, self.clock() - self.started
        speed = f"  {steps * self.tokens_per_step / seconds:,.0f} tokens/s" if steps > 0 else ""
        if done > self.first:
            self.update(done, f"loss {loss:.4f}{speed}")

    def _now(self) -> float:
        if self.device.type == "cuda":  # a step is launched long before it has run
            torch.cuda.synchronize(self.device)
        return self.clock()
