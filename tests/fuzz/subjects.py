"""The inputs that the fuzzer damages: small models, and all other files that slimstate reads."""

import gzip
import json
import lzma
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

import tiny
from command import quiet
from places import TESTS
from quantising import SCHEMES, quantise

PLAIN = ("delta_net-plain", "gated_deltanet-plain", "linear_attn-plain", "qwen3_next-plain", "mamba2-plain")
# which schemes of quantised weights, by the model that has them; those of FP8 also run on a CPU
QUANTISED = {
    "fp8-blocks": "qwen3_next-plain", "ct-w4-asymmetric": "qwen3_next-plain", "awq": "mamba2-plain",
    "gptq": "qwen3_next-plain", "mlx-4": "mamba2-plain", "modelopt-nvfp4": "mamba2-plain",
}  # fmt: skip
MODELS = (*PLAIN, *QUANTISED)
SCHEME = "scheme.txt"  # beside quantised weights, for the oracle
CALIBRATION = ("--samples", "2", "--length", "64")
RECIPE = """title = "fuzz"
about = "cuts"
reproduces = ["tab:none"]
[paper]
models = ["model", {model = "model", key_dims = [6]}]
key_dims = [8]
[small]
key_dims = [4]
[[steps]]
command = "prune"
each = {model = "models", key_dim = "key_dims"}
only = "paper"
model = "{model}"
method = "l1"
key_dim = "{key_dim}"
out = "{out}/{model:name}-{key_dim}"
[[steps]]
command = "inspect"
model = "model"
"""


def build(root: Path) -> None:
    """Write all inputs below `root`; a case copies what it needs."""
    text = tiny.text(20_000)
    for name in PLAIN:
        sharded = {"delta_net-plain": "60KB", "qwen3_next-plain": "200KB"}
        tiny.save(tiny.build(tiny.VARIANTS[name]), root / name, sharded.get(name, "5GB"))
    chosen = ("in_proj.weight", "qkvz.weight")
    for scheme, name in QUANTISED.items():
        whole = tiny.save(tiny.build(tiny.VARIANTS[name]), root / f"{scheme}-base")
        quantise(whole, root / scheme, SCHEMES[scheme], lambda tensor: tensor.endswith(chosen))
        path = root / scheme / "model.safetensors"
        tensors = load_file(path)  # scales that are powers of two stay exact where weights become bfloat16
        powers = {name: 2 ** each.log2().round() for name, each in tensors.items() if name.endswith("scale_inv")}
        save_file(tensors | powers, path, {"format": "pt"})
        (root / scheme / SCHEME).write_text(scheme)
        shutil.rmtree(whole)
    data, model = root / "text", root / MODELS[0]
    data.mkdir()
    (data / "plain.txt").write_text(text)
    rows = "".join(json.dumps({"text": line}) + "\n" for line in text.split("\n"))
    (data / "rows.jsonl").write_text(rows)
    (data / "plain.txt.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
    (data / "rows.jsonl.xz").write_bytes(lzma.compress(rows.encode()))
    calibrated = ("--data", data / "plain.txt", *CALIBRATION)
    quiet("prune", model, "--out", root / "cut", "--method", "drrqr", "--key-dim", 8, *calibrated,
          "--evidence", root / "evidence.safetensors")  # fmt: skip
    quiet("prune", model, "--out", root / "random", "--method", "random", "--key-dim", 8)
    for name, model_cut in (("plan.json", "random"), ("calibrated.json", "cut")):
        shutil.copyfile(root / model_cut / "slimstate_plan.json", root / name)
    records = root / "records"
    records.mkdir()
    for path in sorted((TESTS / "records" / "examples").glob("*.json")):
        if path.stat().st_size < 300_000:
            shutil.copyfile(path, records / f"example-{path.name}")
    quiet("eval", root / "cut", "--text", data / "plain.txt", "--length", 64, "--max-tokens", 512, "--baseline", model,
          "--out", records / "evaluation.json")  # fmt: skip
    shutil.copyfile(root / "plan.json", records / "slimstate_plan.json")
    (root / "recipe.toml").write_text(RECIPE)
