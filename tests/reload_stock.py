"""Run in a fresh process: load each folder with the stock class, save its logits. No slimstate until they are loaded.

Hybrid models are the exception: fla's softmax layer asks for flash-attn when it is made, which a CPU does not have.
"""

import json
import sys
import warnings
from pathlib import Path

warnings.simplefilter("ignore")

import fla  # noqa: E402, F401
import torch  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

FIELDS = ("missing_keys", "unexpected_keys", "mismatched_keys")


def main() -> None:
    folders = [Path(argument) for argument in sys.argv[2:]]
    folders.sort(key=lambda folder: json.loads((folder / "config.json").read_text()).get("attn") is not None)
    ids = torch.load(sys.argv[1])
    models = {}
    for folder in folders:
        if json.loads((folder / "config.json").read_text()).get("attn") is not None:
            import slimstate

            slimstate.prepare_fla()
        else:
            assert "slimstate" not in sys.modules
        model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        assert not any(report[name] for name in FIELDS), (folder, report)
        assert type(model).__module__.startswith("fla.models.")
        models[folder] = model.eval()
    import slimstate

    slimstate.prepare_fla()
    for folder, model in models.items():
        with torch.inference_mode():
            torch.save(model(input_ids=ids, use_cache=False).logits, folder / "logits.pt")


main()
