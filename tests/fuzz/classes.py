"""The classes of damage. Each builds a folder with damaged input, and the command that reads it there.

The folder of a case holds the source under its own name, `work` for outputs, and `outside`, which must not be touched.
Commands run in the folder, so that all paths are relative.
"""

import gzip
import json
import lzma
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random

import torch
from safetensors.torch import load_file, save_file

from fuzz.mutations import STRANGE, changed, changed_bytes, changed_header, changed_json, joined, split
from fuzz.subjects import CALIBRATION, MODELS, QUANTISED

OUT = "work/out"
INDEX = "model.safetensors.index.json"
CALIBRATED = ("--method", "drrqr", "--data", "text/plain.txt", *CALIBRATION)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A command, its output, and the model that a written model is compared with.

    With `keeps`, outputs that were finished before an error stay.
    """

    words: tuple[str, ...]
    out: str | None = OUT
    model: str | None = None
    keeps: bool = False

    def outputs(self, succeeded: bool) -> frozenset[str]:
        """Return the paths, relative to the folder, where the command may have written."""
        flagged = {value for flag, value in pairwise(self.words) if flag in ("--out", "--evidence")}
        paths = flagged if self.keeps else {self.out or ""}
        normal = {os.path.normpath(path) for path in paths if path}
        return frozenset(normal) if succeeded or self.keeps else frozenset()


def prune(random: Random, model: str = "model", *options: str) -> Case:
    method = options or random.choice((("--method", "l1"), ("--method", "random"), CALIBRATED))
    words = ("prune", model, "--out", OUT, "--key-dim", random.choice(("8", "8", "4", "12")), *method)
    return Case(words=words, model=model)


def any_command(random: Random) -> Case:
    """Return a command that reads a model; mostly prune, which writes one."""
    text, steps = ("--text", "text/plain.txt"), ("--steps", "1", "--length", "64", "--batch-size", "1")
    swept = ("--text-length", "64", "--max-tokens", "256", "--out", OUT, "--methods", "l1,random", "--key-dims", "8")
    others = (
        Case(words=("inspect", "model"), out=None),
        Case(words=("eval", "model", *text, "--length", "64", "--max-tokens", "256"), out=None),
        Case(words=("prune", "model", "--method", "l1", "--compression", "0.5", "--dry-run"), out=None),
        Case(words=("prune", "model", "--key-dim", "8", "--plan-only"), out=None),
        Case(words=("analyze", "model", *text, "--length", "64", "--skip", "16", "--out", OUT)),
        Case(words=("sweep", "model", *text, *swept)),
        Case(words=("train", "model/config.json", "--data", text[1], "--tokenizer", "model", *steps, "--out", OUT)),
    )
    return prune(random) if random.random() < 0.7 else random.choice(others)


def rewrite(path: Path, change: Callable[[Random, bytes], bytes], random: Random) -> None:
    path.write_bytes(change(random, path.read_bytes()))


def with_model(random: Random, seeds: Path, here: Path, names: tuple[str, ...] = MODELS) -> Path:
    return Path(shutil.copytree(seeds / random.choice(names), here / "model"))


def shard(random: Random, model: Path) -> Path:
    return random.choice(sorted(model.glob("*.safetensors")))


def config(random: Random, seeds: Path, here: Path) -> Case:
    model = with_model(random, seeds, here, (*MODELS, "cut"))
    if random.random() < 0.25:
        path = model / "config.json"
        data = json.loads(path.read_text())
        data[random.choice(NAMES)] = random.choice(STRANGE[:-1])
        path.write_text(json.dumps(data))
    else:
        rewrite(model / "config.json", changed_json, random)
    return any_command(random)


NAMES = (
    "dtype", "torch_dtype", "attn_implementation", "_attn_implementation", "experts_implementation", "auto_map",
    "quantization_config", "configuration_files", "transformers_weights", "norm_eps", "rms_norm_eps", "slimstate",
    "num_hidden_layers", "num_heads", "vocab_size", "fusion_config", "per_layer_config", "attn", "layer_types",
    "text_config", "tie_word_embeddings", "tokenizer_class", "id2label", "rope_parameters", "kernel_config",
)  # fmt: skip


def header(random: Random, seeds: Path, here: Path) -> Case:
    rewrite(shard(random, with_model(random, seeds, here)), changed_header, random)
    return any_command(random)


def index(random: Random, seeds: Path, here: Path) -> Case:
    model = with_model(random, seeds, here, ("delta_net-plain", "qwen3_next-plain"))
    path = model / INDEX
    if random.random() < 0.4:
        rewrite(path, changed_json, random)
        return any_command(random)
    data = json.loads(path.read_text())
    names = sorted(set(data["weight_map"].values()))
    old = random.choice(names)
    new = random.choice((
        "../outside/other.safetensors", str(here / "outside" / "other.safetensors"), f"./{old}", f"x/../{old}", "", ".",
        f"../model/{old}", "config.json", f"{old}\x00", "sub/" + old, "~/x", names[0], f"{old}/", "link.safetensors",
    ))  # fmt: skip
    data["weight_map"] = {name: new if file == old else file for name, file in data["weight_map"].items()}
    path.write_text(json.dumps(data))
    if random.random() < 0.5:
        shutil.copyfile(model / old, here / "outside" / "other.safetensors")
        (model / "link.safetensors").symlink_to(here / "outside" / "other.safetensors")
    return any_command(random)


def files(random: Random, seeds: Path, here: Path) -> Case:
    """Links, special files, and files that do not belong beside a model."""
    model = with_model(random, seeds, here)
    target = model / random.choice((
        "vocab.txt", "notes/x", "generation_config.json", "tokenizer.json", "merges.txt", "adapter_config.json", "x.py",
        "config.json", "special_tokens_map.json", "chat_template.jinja", "added_tokens.json", "model.safetensors",
    ))  # fmt: skip
    target.unlink(missing_ok=True)
    kind = random.randrange(5)
    if kind == 0:
        os.mkfifo(target)
    elif kind == 1:
        target.symlink_to(random.choice(("/etc/passwd", "/dev/zero", "/", "nowhere", target.name, "config.json", "..")))
    elif kind == 2:
        target.symlink_to(here / "outside" / "secret.txt")
    elif kind == 3:
        target.mkdir()
    else:
        target.write_bytes(random.choice((b"", b"{}", b"[]", b"null", b"\xff\xfe", b"{" * 5000, random.randbytes(100))))
    return any_command(random)


def plan(random: Random, seeds: Path, here: Path) -> Case:
    shutil.copytree(seeds / MODELS[0], here / "model")
    shutil.copyfile(seeds / random.choice(("plan.json", "calibrated.json")), here / "plan.json")
    rewrite(here / "plan.json", changed_json, random)
    return Case(words=("prune", "model", "--apply", "plan.json", "--out", OUT), model="model")


def evidence(random: Random, seeds: Path, here: Path) -> Case:
    shutil.copytree(seeds / MODELS[0], here / "model")
    path = here / "evidence.safetensors"
    shutil.copyfile(seeds / path.name, path)
    head, body = split(path.read_bytes())
    kind = random.randrange(4)
    if kind == 0:
        rewrite(path, changed_header, random)
    elif kind == 1:
        about = json.loads(head["__metadata__"]["about"])
        head["__metadata__"]["about"] = json.dumps(changed(random, about))
        path.write_bytes(joined(json.dumps(head).encode(), body))
    else:
        tensors = load_file(path)
        name = random.choice(sorted(tensors))
        spoil(random, tensors, name)
        save_file(tensors, path, head["__metadata__"])
    method = random.choice(("drrqr", "drrqr", "s-wanda", "grad"))
    return prune(random, "model", "--method", method, "--evidence", path.name)


def spoil(random: Random, tensors: dict[str, torch.Tensor], name: str) -> None:
    """Change the values, the shape or the dtype of one tensor, or remove it."""
    tensor = tensors[name]
    if tensor.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        spoil_codes(random, tensors, name)
        return
    flat = tensor.flatten().clone()
    noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(random.randrange(10**6)))
    at = random.randrange(len(flat))
    flat[at] = random.choice((torch.nan, torch.inf, -torch.inf, 1e30, -1.0))
    dtype = random.choice((torch.float16, torch.int64, torch.float64, torch.bool))
    chosen = random.choice((
        flat.view(tensor.shape), torch.zeros_like(tensor), noise.to(tensor.dtype), -tensor, tensor * 1e30,
        tensor.flatten()[:1].clone(), tensor.flatten(), tensor.to(dtype), None,
    ))  # fmt: skip
    if chosen is None:
        del tensors[name]
    else:
        tensors[name] = chosen


def spoil_codes(random: Random, tensors: dict[str, torch.Tensor], name: str) -> None:
    """Change the bytes, the shape or the dtype of a tensor of a quantised weight, or remove it."""
    tensor = tensors.pop(name)
    data = bytearray(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    if data:
        data[random.randrange(len(data))] ^= random.choice((1, 127, 128, 255))
    changed = torch.frombuffer(data or bytearray(1), dtype=torch.uint8)[: len(data)]
    chosen = random.choice((
        changed.view(tensor.dtype).view(tensor.shape), tensor[:1].clone() if tensor.ndim else tensor.view(1),
        tensor.flatten(), tensor.view(torch.uint8), tensor.T.contiguous() if tensor.ndim == 2 else tensor, None,
        tensor.float() if tensor.dtype not in (torch.uint32,) else tensor.view(torch.int32),
    ))  # fmt: skip
    tensors |= {} if chosen is None else {name: chosen}


def quantised(random: Random, seeds: Path, here: Path) -> Case:
    """Tensors of a quantised weight, or what the config says about them."""
    model = with_model(random, seeds, here, tuple(QUANTISED))
    path = model / "config.json"
    data = json.loads(path.read_text())
    field = next(name for name in ("quantization", "quantization_config") if data.get(name))
    if random.random() < 0.4:
        data[field] = changed(random, data[field])
        path.write_text(json.dumps(data))
    else:
        path = shard(random, model)
        tensors = load_file(path)
        parts = sorted(name for name in tensors if "in_proj" in name and "in_proj_ba" not in name)
        if random.random() < 0.8:
            spoil(random, tensors, random.choice(parts))
        else:  # a part of another format
            part = random.choice(("qzeros", "weight_scale", "weight_packed", "weight", "g_idx", "weight_scale_2", "x"))
            tensors[f"{parts[0].rpartition('.')[0]}.{part}"] = torch.ones(random.choice(((), (1,), (192, 1), (2, 2))))
        save_file(tensors, path, {"format": "pt"})
    return prune(random, "model", "--method", random.choice(("random", "random", "l1")))


def weights(random: Random, seeds: Path, here: Path) -> Case:
    path = shard(random, with_model(random, seeds, here))
    if random.random() < 0.3:
        rewrite(path, changed_bytes, random)
    else:
        tensors = load_file(path)
        spoil(random, tensors, random.choice(sorted(tensors)))
        save_file(tensors, path, {"format": "pt"})
    return any_command(random)


def records(random: Random, seeds: Path, here: Path) -> Case:
    shutil.copytree(seeds / "records", here / "records")
    chosen = random.choice(sorted((here / "records").iterdir()))
    if random.random() < 0.05:
        chosen.unlink()
        os.mkfifo(chosen)
    else:
        rewrite(chosen, changed_json, random)
    return Case(words=("report", "records", "--out", "work/out.html"), out="work/out.html")


def text(random: Random, seeds: Path, here: Path) -> Case:
    shutil.copytree(seeds / MODELS[0], here / "model")
    chosen = random.choice(sorted((seeds / "text").iterdir()))
    (here / "text").mkdir()
    target = here / "text" / chosen.name
    shutil.copyfile(chosen, target)
    kind = random.randrange(5)
    if kind == 0 and ".jsonl" in target.name:
        rows = chosen.read_bytes() if chosen.suffix == ".jsonl" else lzma.decompress(chosen.read_bytes())
        spoiled = changed_json(random, rows.split(b"\n")[0]) + b"\n" + rows
        target.write_bytes(spoiled if chosen.suffix == ".jsonl" else lzma.compress(spoiled))
    elif kind == 1:
        target.unlink()
        odd = (os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: path.mkdir())
        random.choice(odd)(target)
    elif kind == 2:
        size = random.choice((0, 1, 10**6, 10**8))
        target.unlink()
        content = random.choice((b"a", b"\n", b" ", b"\xc3\xa9", b"{")) * size
        (here / "text" / "bomb.txt.gz").write_bytes(gzip.compress(content, 1, mtime=0))
    else:
        rewrite(target, changed_bytes, random)
    which = "text" if random.random() < 0.5 else str(next(iter(sorted((here / "text").iterdir()))).relative_to(here))
    how = random.choice(((), ("--documents", random.choice(("lines", "blank", "file", "rows")))))
    return prune(random, "model", "--method", "drrqr", "--data", which, *CALIBRATION, *how)


def tokenizer(random: Random, seeds: Path, here: Path) -> Case:
    model = with_model(random, seeds, here, MODELS[:1])
    names = ("tokenizer.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
    path = model / random.choice(names)
    if path.exists():
        rewrite(path, changed_json, random)
    return prune(random, "model", *CALIBRATED)


def recipe(random: Random, seeds: Path, here: Path) -> Case:
    shutil.copytree(seeds / MODELS[0], here / "model")
    content = (seeds / "recipe.toml").read_text()
    if random.random() < 0.3:
        data = changed_bytes(random, content.encode())
    else:
        new = random.choice((
            "{out.x}", "each = 5", 'command = ""', 'command = "run"', "{", "}", "{0}", "{models}", "{model!r}", "[]",
            '"', "only = 5", "steps = 3", "title = 1", "{out[x]}", "{model:>9999999999}", "[[steps]]\n", "= {}",
            "\x00", "key_dim = 1979-05-27", "out = 5", "model = []", "options = 5", 'options = "{key_dims}"',
            "inf", "-1", "1e999", '"\\u0000"',
        ))  # fmt: skip
        lines = content.split("\n")
        at = random.randrange(len(lines))
        cut = random.randrange(len(lines[at]) + 1)
        lines[at] = random.choice((new, lines[at][:cut] + new + lines[at][cut:], ""))
        data = "\n".join(lines).encode()
    (here / "recipe.toml").write_bytes(data)
    more = random.choice((("--dry-run",), ("--small",), (), ("--set", "models=model"), ("--set", "key_dims=x")))
    return Case(words=("run", "recipe.toml", "--out", OUT, *more), keeps=True)


def provenance(random: Random, seeds: Path, here: Path) -> Case:
    """The config beside a result, which `run` repeats."""
    shutil.copytree(seeds / MODELS[0], here / "model")
    path = here / "result" / "slimstate_config.json"
    shutil.copytree(seeds / random.choice(("cut", "random")), path.parent)
    values = {name: value for name, value in json.loads(path.read_text()).items() if name != "evidence"}
    path.write_text(json.dumps(values | {"model": "model", "data": "text/plain.txt"}))
    rewrite(path, changed_json, random)
    return Case(words=("run", "result", "--out", OUT), model="model")


def arguments(random: Random, seeds: Path, here: Path) -> Case:
    shutil.copytree(seeds / MODELS[0], here / "model")
    valid = (
        ["prune", "model", "--out", OUT, "--key-dim", "8", "--method", "l1"],
        ["prune", "model", "--out", OUT, "--key-dim", "8", *CALIBRATED],
        ["inspect", "model", "--state-mb", "0.01"],
        ["eval", "model", "--text", "text/plain.txt", "--length", "64", "--max-tokens", "256", "--out", "work/out"],
        ["report", "records", "--out", "work/out"],
    )
    words = list(random.choice(valid))
    flags = (
        "--force", "--json", "--compression", "--seed", "--dtype", "--device", "--documents", "--score", "--rrqr-f",
        "--max-memory", "--device-map", "--evidence", "--apply", "--plan-only", "--dry-run", "--tasks", "--out",
        "--reconstruct", "--distill", "--reconstruct-steps", "--state-mb", "--engine",
    )  # fmt: skip
    values = [str(value) for value in STRANGE if isinstance(value, (str, int, float)) and "\x00" not in str(value)]
    values = [value.encode("utf-8", "replace").decode() for value in values]
    values += ["work/out/x/y", "./", "work", "-", "--", "text"]
    for _ in range(random.choice((1, 1, 2, 3))):
        at = random.randrange(1, len(words) + 1)
        kind = random.randrange(4)
        if kind == 0:
            words[at:at] = [random.choice(flags), random.choice(values)]
        elif kind == 1 and at < len(words):
            words[at] = random.choice(values)
        elif kind == 2 and at < len(words):
            del words[at]
        else:
            words.insert(at, random.choice(flags))
    return Case(words=tuple(words), keeps=True)


CLASSES: dict[str, Callable[[Random, Path, Path], Case]] = {
    build.__name__: build
    for build in (
        config, header, index, files, plan, evidence, records, text, recipe, tokenizer, weights, quantised, arguments,
        provenance,
    )
}  # fmt: skip
