"""Run in a fresh process, with -O: vLLM's Triton kernels of the gated delta rule on a CPU, by Triton's interpreter.

Arguments: the folder `vllm` of an unpacked wheel, a file of inputs by name, a file for outputs. Only the modules of the
kernels are imported; the few names they take from the rest of vLLM stand in here. Some refuse float32 by an assertion,
hence the -O.
"""

import builtins
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl
from triton.runtime.autotuner import Autotuner

ROOT, INPUTS, OUTPUTS = Path(sys.argv[1]), *sys.argv[2:]
KERNELS = "vllm.third_party.flash_linear_attention.ops"
tuned = Autotuner.__init__


def one_variant(self: Autotuner, *args, **kwargs) -> None:
    """Variants of a kernel are timed, which takes a GPU, where there are several."""
    tuned(self, *args, **kwargs)
    self.configs = self.configs[:1]


class Index(int):
    """What a loop of a kernel counts with; compiled, it is a tensor, and kernels ask for its type."""

    def to(self, dtype: object) -> int:
        return self


def counted(*bounds) -> Iterator[int]:
    return map(Index, builtins.range(*bounds))


def by_name(name: str) -> Callable[..., object]:
    """A function of Triton's language, looked up when it is called: the interpreter puts its own there meanwhile."""

    def called(*args, **kwargs) -> object:
        return getattr(tl, name)(*args, **kwargs)

    return called


def put(name: str, **content: object) -> ModuleType:
    module = sys.modules[name] = ModuleType(name)
    vars(module).update(content)
    return module


def stand_in() -> None:
    """The packages without what they import at once, and what the kernels take from elsewhere in vLLM."""
    parts = KERNELS.split(".")
    for count in range(1, len(parts) + 1):
        put(".".join(parts[:count])).__path__ = [str(ROOT.joinpath(*parts[1:count]))]
    platform = SimpleNamespace(is_cuda_alike=lambda: False, is_rocm=lambda: False, is_xpu=lambda: False)
    put("vllm.triton_utils", triton=triton, tl=tl, tldevice=None)
    put("vllm.platforms", current_platform=platform)
    put("vllm.utils").__path__ = []
    put("vllm.utils.gpu_sync_debug", gpu_sync_allowed=nullcontext)
    put("vllm.utils.torch_utils", async_tensor_h2d=torch.as_tensor)
    powers = {"cdiv": triton.cdiv, "next_power_of_2": triton.next_power_of_2, "RCP_LN2": 1.4426950408889634}
    put("vllm.utils.math_utils", **powers)
    torch.accelerator.device_index = lambda index: nullcontext()


def main() -> None:
    Autotuner.__init__ = one_variant
    stand_in()
    from vllm.third_party.flash_linear_attention.ops.chunk import chunk_gated_delta_rule
    from vllm.third_party.flash_linear_attention.ops.fused_recurrent import fused_recurrent_gated_delta_rule_fwd

    for name, module in list(sys.modules.items()):
        if name.startswith(f"{KERNELS}."):
            module.range = counted
            for alias in ("exp", "exp2", "log", "log2", "gather"):
                if hasattr(module, alias):
                    setattr(module, alias, by_name(alias))
    found = {}
    for name, given in torch.load(INPUTS).items():
        scale = given["q"].shape[-1] ** -0.5
        rest = {key: given[key] for key in ("q", "k", "v", "g", "beta")} | {"scale": scale}
        with torch.inference_mode():
            prefill = chunk_gated_delta_rule(**rest, initial_state=given["state"].clone(), output_final_state=True)
            decoding = fused_recurrent_gated_delta_rule_fwd(
                **rest, initial_state=given["state"].clone(), inplace_final_state=False
            )
        found[name] = {"prefill": prefill, "decoding": (decoding[0], decoding[1][-1:])}
    torch.save(found, OUTPUTS)


main()
