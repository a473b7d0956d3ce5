"""How Triton chooses between the variants of a kernel: it compiles and times each, hundreds for a key width.

It has no way to leave out one that breaks: an illegal memory access ends the process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from inspect import signature
from typing import Any

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


def compile_side_by_side(threads: int) -> None:
    """Compile the variants of a kernel in so many threads before they are timed one after the other; by itself Triton
    compiles each just before it is timed.
    """
    import triton
    from triton.runtime.autotuner import Autotuner

    mode = getattr(triton, "AsyncCompileMode", None)  # since Triton 3.6 as it is used here
    if (
        threads < 2
        or hasattr(Autotuner, "untried")
        or mode is None
        or "ignore_errors" not in signature(mode).parameters
    ):
        return
    choose, time_one = Autotuner.prune_configs, Autotuner._bench

    def choosing(tuner: Any, options: Mapping[str, Any]) -> Any:
        tuner.untried = choose(tuner, options)
        return tuner.untried

    def timing_one(tuner: Any, *arguments: Any, config: Any, **options: Any) -> Any:
        if len(tuner.untried) > 1:  # not reached where an earlier choice was kept on disk
            _compile(tuner.fn, tuner.untried, arguments, options, threads)
        tuner.untried = ()
        return time_one(tuner, *arguments, config=config, **options)

    Autotuner.untried, Autotuner.prune_configs, Autotuner._bench = (), choosing, timing_one


def _compile(
    kernel: Any, variants: Sequence[Any], arguments: Sequence[Any], options: Mapping[str, Any], threads: int
) -> None:
    """Fill the kernel's cache. What cannot be compiled is left to the timing, where Triton knows what to do."""
    import triton

    pool = ThreadPoolExecutor(threads)
    try:
        with triton.AsyncCompileMode(pool, ignore_errors=True):
            for variant in variants:
                kernel.run(*arguments, **{**options, **variant.all_kwargs(), "warmup": True})
    finally:
        pool.shutdown(cancel_futures=True)


def leave_out_faulty() -> None:
    """Keep kernels of the delta rule whose blocks are as wide as the key to the variants that work below key dim 64.

    Seen with Triton 3.6 on an H200 at key dims 16 and 32, where those with 4 warps make illegal memory accesses, each
    time or now and then; those with 2 give right results. Others report the same of blocks of 32 (triton issue 11366).
    """
    from fla.ops.common.chunk_o import chunk_bwd_kernel_dqkwg, chunk_bwd_kernel_dv_local
    from fla.ops.delta_rule.wy_fast import recompute_w_u_fwd_kernel

    for kernel in (chunk_bwd_kernel_dqkwg, chunk_bwd_kernel_dv_local, recompute_w_u_fwd_kernel):
        kernel.fn.early_config_prune = _without_faulty


def _without_faulty(variants: Sequence[Any], arguments: Mapping[str, Any], **options: Any) -> list[Any]:
    narrow = {**arguments, **options}["K"] < 64
    return [each for each in variants if not narrow or each.num_warps <= 2]
