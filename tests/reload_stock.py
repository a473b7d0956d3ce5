"""Run in a fresh process: load each folder with the stock class, save its logits. No slimstate until they are loaded.

Hybrids of fla are the exception: its softmax layer asks for flash-attn when it is made, which a CPU does not have.
With --without-fla fla cannot be imported, and slimstate is not needed at all; with --with-fla it can. Both are for
models of transformers, which choose their kernels by that. With --without-peft PEFT cannot be imported.
"""

import json
import sys
import warnings
from pathlib import Path

warnings.simplefilter("ignore")
KIND = sys.argv.pop(1).strip("-") if sys.argv[1].startswith("--") else "fla"
IDS, *FOLDERS = sys.argv[1:]
if KIND.startswith("without-"):
    assert KIND.removeprefix("without-") not in sys.modules
    sys.modules[KIND.removeprefix("without-")] = None  # type: ignore[assignment]
if KIND == "without-peft":
    KIND = "fla"
if KIND == "fla":
    import fla  # noqa: F401
import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as LANGUAGE_MODELS  # noqa: E402

FIELDS = ("missing_keys", "unexpected_keys", "mismatched_keys")


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def whole(folder: Path) -> torch.nn.Module:
    """The model with all that its files hold, of which no tensor may be left over."""
    kind = AutoModelForImageTextToText if "vision_config" in config_of(folder) else AutoModelForCausalLM
    model, report = kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(report[name] for name in FIELDS), (folder, report)
    return model.eval()


def main() -> None:
    def comes_late(folder: Path) -> tuple[bool, bool]:
        """Some modules import fla where they can, which then has the names of other models, too."""
        config = config_of(folder)
        return config.get("attn") is not None, config["model_type"] in ("glm5_next", "kimi_linear")

    folders = sorted(map(Path, FOLDERS), key=comes_late)
    ids = torch.load(IDS)
    models = {}
    for folder in folders:
        if config_of(folder).get("attn") is not None:
            import slimstate

            slimstate.prepare_fla()
        else:
            assert "slimstate" not in sys.modules
        models[folder] = [whole(folder)]
        module = type(models[folder][0]).__module__
        assert module.startswith("fla.models." if KIND == "fla" else "transformers.models."), module
        if "vision_config" in config_of(folder) and config_of(folder)["model_type"] in LANGUAGE_MODELS:
            models[folder].append(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())
    if KIND != "without-fla":
        import slimstate

        for folder in folders:
            slimstate.prepare(config_of(folder)["model_type"])
    for folder, versions in models.items():
        with torch.inference_mode():
            logits = [model(input_ids=ids, use_cache=False).logits for model in versions]
            assert all(torch.equal(logits[0], other) for other in logits)
            torch.save(logits[0], folder / ("logits.pt" if KIND == "fla" else f"logits-{KIND}.pt"))
    assert KIND != "without-fla" or "slimstate" not in sys.modules


main()
