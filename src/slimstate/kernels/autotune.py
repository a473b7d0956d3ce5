"""Control how Triton chooses between the variants of a kernel: it compiles and times each, hundreds for a key width.

Triton cannot skip a variant that fails: an illegal memory access ends the process.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from inspect import signature
from typing import Any

Timer = Callable[[Callable[[], object], Sequence[float]], list[float]]
WARMUP_MS, TIMING_MS = 5, 25  # a quarter of Triton's defaults; compiling takes most of the rest


def time_variants_with(timer: Timer) -> None:
    """Make Triton time variants with a function that takes a call and the quantiles to return."""
    from triton.runtime.autotuner import Autotuner

    Autotuner.do_bench = property(lambda tuner: timer, lambda tuner, value: None)


def tune_briefly() -> None:
    """Make Triton time variants briefly; a process that compiles ahead of a benchmark runs them untimed."""
    time_variants_with(_run_untimed if "SLIMSTATE_COMPILING" in os.environ else _time_briefly)


def _run_untimed(kernel: Callable[[], object], quantiles: Sequence[float]) -> list[float]:
    kernel()
    return [1.0 for _ in quantiles]


def _time_briefly(kernel: Callable[[], object], quantiles: Sequence[float]) -> list[float]:
    from triton.testing import do_bench

    return do_bench(kernel, warmup=WARMUP_MS, rep=TIMING_MS, quantiles=quantiles)


def compile_in_threads(threads: int) -> None:
    """Compile the variants of a kernel in threads before they are timed; Triton itself compiles one after the other."""
    import triton
    from triton.runtime.autotuner import Autotuner

    mode = getattr(triton, "AsyncCompileMode", None)  # since Triton 3.6 with `ignore_errors`
    is_supported = mode is not None and "ignore_errors" in signature(mode).parameters
    if threads < 2 or hasattr(Autotuner, "untried") or not is_supported:
        return
    choose, time_one = Autotuner.prune_configs, Autotuner._bench

    def note_variants(tuner: Any, options: Mapping[str, Any]) -> Any:
        tuner.untried = choose(tuner, options)
        return tuner.untried

    def compile_then_time(tuner: Any, *arguments: Any, config: Any, **options: Any) -> Any:
        if len(tuner.untried) > 1:  # Triton does not come here if it has cached its choice on disk
            _compile(tuner.fn, tuner.untried, arguments, options, threads)
        tuner.untried = ()
        return time_one(tuner, *arguments, config=config, **options)

    Autotuner.untried, Autotuner.prune_configs, Autotuner._bench = (), note_variants, compile_then_time


def _compile(
    kernel: Any, variants: Sequence[Any], arguments: Sequence[Any], options: Mapping[str, Any], threads: int
) -> None:
    """Fill the kernel's cache; variants that cannot be compiled are left to the timing, which handles them."""
    import triton

    pool = ThreadPoolExecutor(threads)
    try:
        with triton.AsyncCompileMode(pool, ignore_errors=True):
            for variant in variants:
                kernel.run(*arguments, **{**options, **variant.all_kwargs(), "warmup": True})
    finally:
        pool.shutdown(cancel_futures=True)


def remove_faulty_variants() -> None:
    """Remove variants of delta-rule kernels with blocks as wide as the key that fail below key dim 64.

    With Triton 3.6 on an H200 at key dims 16 and 32, variants with 4 warps make illegal memory accesses, always or
    sometimes; those with 2 are right. Others report the same for blocks of 32 (triton issue 11366).
    """
    from fla.ops.comba import wy_fast as comba
    from fla.ops.common import chunk_o as common
    from fla.ops.delta_rule.wy_fast import recompute_w_u_fwd_kernel
    from fla.ops.gated_delta_rule import wy_fast as gated

    ungated = (common.chunk_bwd_kernel_dqkwg, common.chunk_bwd_kernel_dv_local, recompute_w_u_fwd_kernel)
    # not seen to fail, because their backward passes were refused there; they have the same blocks
    others = (common.chunk_bwd_kernel_dv, gated.prepare_wy_repr_bwd_kernel, comba.prepare_wy_repr_bwd_kernel)
    for kernel in (*ungated, *others):
        kernel.fn.early_config_prune = _without_faulty


def _without_faulty(variants: Sequence[Any], arguments: Mapping[str, Any], **options: Any) -> list[Any]:
    narrow = {**arguments, **options}["K"] < 64
    return [variant for variant in variants if not narrow or variant.num_warps <= 2]
