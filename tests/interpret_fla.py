"""Load each folder with fla's class and save the logits that fla's own kernels compute. Runs in a fresh process.

Triton's interpreter runs the kernels on a CPU; slimstate is not imported until the logits are there. Saved beside them
are the differences of `gradient_differences`.
"""

import sys
import warnings
from pathlib import Path

warnings.simplefilter("ignore")

from interpreting import loop_range  # noqa: E402, I001  before anything that imports Triton

import fla  # noqa: E402, F401
import torch  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

IDS, OUT, *FOLDERS = sys.argv[1:]


def main() -> None:
    load = AutoModelForCausalLM.from_pretrained
    models = {folder: load(folder, dtype=torch.float32).eval() for folder in map(Path, FOLDERS)}
    for name, module in list(sys.modules.items()):
        if name.startswith("fla.ops"):
            module.range = loop_range
    if "slimstate" in sys.modules:
        sys.exit("slimstate was imported")
    sequences, logits = torch.load(IDS), {}
    for folder, model in models.items():
        logits[folder.name] = []
        with torch.inference_mode():
            for ids in sequences:
                first = model(input_ids=ids[:, :-1], use_cache=True)
                last = model(input_ids=ids[:, -1:], past_key_values=first.past_key_values, use_cache=True)
                logits[folder.name].append(torch.cat([first.logits, last.logits], dim=1))
    from gradient_differences import differences  # imports slimstate

    torch.save({"logits": logits, "differences": differences()}, OUT)


main()
