"""Prepare Triton's interpreter, which runs kernels on a CPU, before any kernel is imported.

Scripts that run in a process of their own import this module first; it imports nothing of slimstate.
"""

import builtins
import functools
import os
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType

os.environ["TRITON_INTERPRET"] = "1"
KERNELS = ("fla.ops.", "sglang.kernels.", "triton.", "vllm.")


class AssertionStripper(SourceFileLoader):
    """Compile without assertions: some kernels assert that inputs are not float32, and -O would affect torch too."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return compile(self.get_data(path), path, "exec", dont_inherit=True, optimize=1)


class KernelFinder:
    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name.startswith(KERNELS) else None
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = AssertionStripper(name, spec.loader.path)
        return spec


sys.meta_path.insert(0, KernelFinder)

from triton.language.core import is_builtin  # noqa: E402
from triton.runtime import interpreter  # noqa: E402
from triton.runtime.autotuner import Autotuner  # noqa: E402

init_autotuner = Autotuner.__init__


@functools.cache
def functions_of(part: object) -> list[str]:
    """Return the names of the functions in a part of Triton's language, before any of them is replaced."""
    return [name for name in dir(part) if is_builtin(getattr(part, name, None))]


def patch_builtin(part: object, builder: object, scope: object) -> None:
    """Do what the interpreter does for every block of every kernel, without looking at what is no function."""
    for name in functions_of(part):
        if is_builtin(member := getattr(part, name)):
            interpreter._patch_attr(part, name, member, builder, scope)


interpreter._patch_builtin = patch_builtin


def one_variant(self: Autotuner, *args, **kwargs) -> None:
    """Keep the variant of a kernel with the largest blocks, which takes the fewest steps; timing needs a GPU."""
    init_autotuner(self, *args, **kwargs)
    self.configs = [
        max(self.configs, key=lambda variant: sum(size for size in variant.kwargs.values() if isinstance(size, int)))
    ]


Autotuner.__init__ = one_variant


class Index(int):
    """The counter of a loop in a kernel; compiled, it is a tensor, and kernels convert its type."""

    def to(self, dtype: object) -> int:
        return self


def loop_range(*bounds) -> Iterator[int]:
    return map(Index, builtins.range(*bounds))
