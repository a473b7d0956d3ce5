"""How Triton chooses between the variants of a kernel: it times each, and there are hundreds for every key width."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Judge = Callable[[Callable[[], object], Sequence[float]], list[float]]

WARMED_MS, TIMED_MS = 5, 25  # a quarter of what Triton takes; compiling is most of the rest


def judge_variants_by(judge: Judge) -> None:
    """Let Triton judge variants by this function of a call and the quantiles it wants, whatever comes after."""
    from triton.runtime.autotuner import Autotuner

    Autotuner.do_bench = property(lambda tuner: judge, lambda tuner, value: None)


def tune_briefly() -> None:
    """Judge variants by a short timing, unless something else was chosen."""
    from triton.runtime.autotuner import Autotuner

    if not isinstance(vars(Autotuner).get("do_bench"), property):
        judge_variants_by(_timed_briefly)


def _timed_briefly(kernel: Callable[[], object], quantiles: Sequence[float]) -> list[float]:
    from triton.testing import do_bench

    times: list[float] = do_bench(kernel, warmup=WARMED_MS, rep=TIMED_MS, quantiles=quantiles)
    return times
