"""Triton's interpreter runs kernels on a CPU: what has to be stood in for before they are imported.

Imported first by scripts that run in a process of their own; it imports nothing of slimstate.
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


class Unasserted(SourceFileLoader):
    """Some kernels refuse float32 by an assertion. With -O all of torch would be compiled anew, which takes longer."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return compile(self.get_data(path), path, "exec", dont_inherit=True, optimize=1)


class WithoutAssertions:
    """Finds the kernels and Triton."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name.startswith(KERNELS) else None
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = Unasserted(name, spec.loader.path)
        return spec


sys.meta_path.insert(0, WithoutAssertions)

from triton.language.core import is_builtin  # noqa: E402
from triton.runtime import interpreter  # noqa: E402
from triton.runtime.autotuner import Autotuner  # noqa: E402

tuned = Autotuner.__init__


@functools.cache
def functions_of(part: object) -> list[str]:
    """The functions of Triton's language that a part of it has, found before any of them is replaced."""
    return [name for name in dir(part) if is_builtin(getattr(part, name, None))]


def replaced(part: object, builder: object, scope: object) -> None:
    """As the interpreter does for every block of every kernel, without a look at all that is no function."""
    for name in functions_of(part):
        if is_builtin(member := getattr(part, name)):
            interpreter._patch_attr(part, name, member, builder, scope)


interpreter._patch_builtin = replaced


def one_variant(self: Autotuner, *args, **kwargs) -> None:
    """Variants of a kernel are timed, which takes a GPU, where there are several."""
    tuned(self, *args, **kwargs)
    self.configs = self.configs[:1]


Autotuner.__init__ = one_variant


class Index(int):
    """What a loop of a kernel counts with; compiled, it is a tensor, and kernels ask for its type."""

    def to(self, dtype: object) -> int:
        return self


def counted(*bounds) -> Iterator[int]:
    return map(Index, builtins.range(*bounds))
