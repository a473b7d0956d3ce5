"""Triton's interpreter runs kernels on a CPU: what has to be stood in for before they are imported.

Imported first by scripts that run in a process of their own; it imports nothing of slimstate.
"""

import builtins
import os
from collections.abc import Iterator

os.environ["TRITON_INTERPRET"] = "1"

from triton.runtime.autotuner import Autotuner

tuned = Autotuner.__init__


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
