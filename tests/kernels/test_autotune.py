"""Variants of a kernel are compiled side by side, for a GPU that need not be there: only running them needs one."""

import pytest

from launching import Program
from slimstate.kernels.autotune import remove_faulty_variants

pytestmark = pytest.mark.slow
PROGRAM = """
import torch, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from slimstate.kernels.autotune import compile_in_threads, time_variants_with


class Card:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)


@triton.autotune([triton.Config({"SIZE": size}) for size in SIZES], key=["N"])
@triton.jit
def double(x, N, SIZE: tl.constexpr):
    tl.static_assert(SIZE != 8)
    at = tl.arange(0, SIZE)
    tl.store(x + at, 2 * tl.load(x + at, mask=at < N), mask=at < N)


compiled, judged = double.fn.device_caches, []
def judge(call, quantiles):
    judged.append(len(compiled[0][0]) if 0 in compiled else 0)
    return [float(len(judged))] * 3


driver.set_active(Card())
time_variants_with(judge)
for _ in range(2):
    compile_in_threads(THREADS)
for length in (10, 20):
    try:
        double[(1,)](torch.zeros(256), length)
    except Exception as error:
        assert "AssertionFailure" not in type(error).__name__, error
print(judged[0], [choice.kwargs["SIZE"] for choice in double.cache.values()])
"""


@pytest.mark.parametrize(
    ("sizes", "threads", "compiled"),
    [
        pytest.param((32, 64, 128), 2, {"3"}, id="all before the first is timed"),
        pytest.param((32, 8, 128), 2, {"2", "3"}, id="but one that cannot be"),
        pytest.param((32, 64, 128), 1, {"0"}, id="one after the other by one thread"),
    ],
)
def test_variants_are_compiled_before_they_are_timed(tmp_path, sizes, threads, compiled):
    program, out, err = (tmp_path / f"program.{kind}" for kind in ("py", "out", "err"))
    program.write_text(PROGRAM.replace("SIZES", repr(sizes)).replace("THREADS", str(threads)))
    code = Program(program, out=out, err=err, TRITON_CACHE_DIR=str(tmp_path)).wait()
    assert code == 0, err.read_text()
    before, choices = out.read_text().splitlines()[-1].split(" ", 1)  # compiled before the first was timed
    assert before in compiled
    assert choices == "[32, 32]"


def test_variants_that_break_narrow_keys_are_left_out():
    from fla.ops.common.chunk_o import chunk_bwd_kernel_dqkwg, chunk_bwd_kernel_dv_local
    from fla.ops.delta_rule.wy_fast import recompute_w_u_fwd_kernel
    from fla.ops.gated_delta_rule.wy_fast import prepare_wy_repr_bwd_kernel

    remove_faulty_variants()
    ungated = (chunk_bwd_kernel_dqkwg, chunk_bwd_kernel_dv_local, recompute_w_u_fwd_kernel)
    for kernel in (*ungated, prepare_wy_repr_bwd_kernel):
        tuner = kernel.fn
        tuner.nargs = {}
        kept = {width: tuner.prune_configs({"K": width}) for width in (32, 64)}
        assert {variant.num_warps for variant in kept[32]} == {2}
        assert kept[64] == tuner.configs
        assert len(kept[32]) < len(kept[64])
