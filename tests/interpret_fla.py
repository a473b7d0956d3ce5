"""Run in a fresh process, with -O: load each folder with fla's class, save the logits that fla's own kernels make.

No slimstate here: Triton's interpreter runs the kernels on a CPU. Some refuse float32 by an assertion, hence the -O.
"""

import builtins
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
warnings.simplefilter("ignore")

import torch  # noqa: E402
from triton.runtime.autotuner import Autotuner  # noqa: E402

IDS, OUT, *FOLDERS = sys.argv[1:]
tuned = Autotuner.__init__


def one_variant(self: Autotuner, *args, **kwargs) -> None:
    """Variants of a kernel are timed, which takes a GPU, where there are several."""
    tuned(self, *args, **kwargs)
    self.configs = self.configs[:1]


Autotuner.__init__ = one_variant

import fla  # noqa: E402, F401
from transformers import AutoModelForCausalLM  # noqa: E402


class Index(int):
    """What a loop of a kernel counts with; compiled, it is a tensor, and kernels ask for its type."""

    def to(self, dtype: object) -> int:
        return self


def counted(*bounds) -> Iterator[int]:
    return map(Index, builtins.range(*bounds))


def main() -> None:
    models = {
        folder: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for folder in map(Path, FOLDERS)
    }
    for name, module in list(sys.modules.items()):
        if name.startswith("fla.ops"):
            module.range = counted
    if "slimstate" in sys.modules:
        sys.exit("slimstate is here")
    sequences, logits = torch.load(IDS), {}
    for folder, model in models.items():
        logits[folder.name] = []
        with torch.inference_mode():
            for ids in sequences:
                first = model(input_ids=ids[:, :-1], use_cache=True)
                last = model(input_ids=ids[:, -1:], past_key_values=first.past_key_values, use_cache=True)
                logits[folder.name].append(torch.cat([first.logits, last.logits], dim=1))
    torch.save(logits, OUT)


main()
