"""What a command may do to a folder, whatever its input is."""

import hashlib
import json
import os
import shutil
import stat
import tempfile
from pathlib import Path

import safetensors
import torch

from cases import cut
from forking import Ended
from fuzz.subjects import SCHEME
from quantising import SCHEMES, parts_of
from tiny import read_tensors as tiny_tensors
from tiny_model import tokenizer

INDEX = "model.safetensors.index.json"
CODES, MAX_LINE, MAX_SECONDS = (0, 2, 3), 500, 10.0


def bad_end(ended: Ended) -> str | None:
    """Return what is wrong with how a command ended, in a word or two and a detail, or None."""
    lines = ended.errors.splitlines()
    last, longest = lines[-1] if lines else "", max(lines, key=len, default="")
    one_line = len(ended.own_lines) == 1 and last.startswith("slimstate: ")
    checks = {
        f"hang: {ended.seconds:.0f} s": ended.timed_out,
        f"traceback: {last}": "Traceback (most recent call last)" in ended.errors,
        f"panic: {last}": "panicked at" in ended.errors,
        f"exit code {ended.code}: {last}": ended.code not in CODES,
        f"slow: {ended.processor:.0f} s of processor": ended.processor > MAX_SECONDS,
        f"long line: {len(longest)} characters, {longest[:100]}": len(longest) > MAX_LINE,
        f"not one line: {last}": ended.code != 0 and not one_line,
    }
    return next((problem for problem, is_wrong in checks.items() if is_wrong), None)


def inventory(folder: Path) -> dict[str, str]:
    """Return a digest of every file under a folder; links and special files by their target and type."""
    files = {}
    for place, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = Path(place) / name
            mode = path.lstat().st_mode
            key = str(path.relative_to(folder))
            if stat.S_ISREG(mode):
                files[key] = hashlib.sha256(path.read_bytes()).hexdigest()
            else:
                files[key] = os.readlink(path) if stat.S_ISLNK(mode) else str(stat.S_IFMT(mode))
    return files


def unexpected_change(before: dict[str, str], after: dict[str, str], outputs: frozenset[str]) -> str | None:
    """Return a change that is neither an output, nor inside one, nor a folder that was created for one."""
    for name in sorted(before.keys() | after.keys()):
        is_new = name not in before
        allowed = any(f"{name}/".startswith(f"{out}/") or (is_new and out.startswith(f"{name}/")) for out in outputs)
        if before.get(name) != after.get(name) and not allowed:
            what = "left" if is_new else "gone" if name not in after else "changed"
            return f"{what}: {name}"
    return None


def bare(folder: Path) -> Path:
    """Copy the weights and the config of a model to a new folder, with a tokenizer that loads."""
    place = Path(tempfile.mkdtemp())
    tokenizer().save_pretrained(place)
    for name in ("config.json", *(path.name for path in folder.glob("*.safetensors"))):
        shutil.copyfile(folder / name, place / name)
    if (folder / INDEX).exists():
        index = json.loads((folder / INDEX).read_text())
        (place / INDEX).write_text(json.dumps({"metadata": {}, **index}))
    return place


def other_rows(source: Path, out: Path, selections: dict) -> str | None:
    """Return which quantised weight stands for other numbers than the rows of its source, by the oracle, or None."""
    from slimstate.checkpoints.reader import described_mixers

    scheme = SCHEMES[(source / SCHEME).read_text()]
    tensors, after = tiny_tensors(source), tiny_tensors(out)
    mixers = described_mixers(json.loads((source / "config.json").read_text()))
    for name in {mixer.name_of(mixer.query) for mixer in mixers}:
        module = name.removesuffix(".weight")
        try:
            rows = cut({name: scheme.values(parts_of(tensors, module))}, mixers, selections)[name]
        except (KeyError, RuntimeError, IndexError):
            continue  # damaged, so that it stands for nothing
        parts = parts_of(after, module)
        is_plain = parts.keys() <= {"weight", "bias"}  # blocks become bfloat16
        if not torch.equal(parts["weight"].float() if is_plain else scheme.values(parts), rows):
            return f"other rows: {name}"
    return None


def difference(source: Path, out: Path) -> str | None:
    """Return how a written model differs from its source with the dropped channels masked, or None."""
    from slimstate.checkpoints.reader import Checkpoint
    from slimstate.core.file_names import PLAN
    from slimstate.models.hooks import masked
    from slimstate.models.load import load
    from slimstate.records.plan import Plan
    from slimstate.system.errors import SlimstateError

    try:
        for path in out.rglob("*.safetensors"):
            with safetensors.safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                    file.get_tensor(name)
        json.loads((out / "config.json").read_text())
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        return f"unloadable: {error}"
    plan = Plan.read(out / PLAN)
    if (source / SCHEME).exists() and (problem := other_rows(source, out, plan.selections)):
        return problem
    ids = torch.randint(0, 200, (1, 40), generator=torch.Generator().manual_seed(0))
    in_blocks = (source / SCHEME).exists() and "blocks" in (source / SCHEME).read_text()
    plain = [name for name, tensor in tiny_tensors(out).items() if in_blocks and tensor.dtype == torch.bfloat16]
    source, out = bare(source), bare(out)
    if plan.corrected:  # other norms may share the epsilon that the cut has multiplied
        before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, out))
        for one, other in ((before, after), (before.get("text_config", {}), after.get("text_config", {}))):
            one |= {name: value for name, value in other.items() if name.endswith(("eps", "epsilon"))}
        (source / "config.json").write_text(json.dumps(before))
    try:
        checkpoint, runtime = Checkpoint.open(source), load(source, device="cpu")
        with torch.inference_mode():
            runtime.model(input_ids=ids, use_cache=False)
    except (SlimstateError, RuntimeError):
        return None  # the source itself does not run
    with torch.inference_mode():
        for name, weight in runtime.model.named_parameters():
            if any(stored.endswith(name.partition("layers.")[2] or name) for stored in plain):
                weight.copy_(weight.bfloat16())  # as the blocks that a cut makes plain
        with masked(runtime.model, checkpoint.mixers, plan.selections, rescaled="query weights" not in plan.correction):
            expected = runtime.model(input_ids=ids, use_cache=False).logits.double()
        actual = load(out, device="cpu").model(input_ids=ids, use_cache=False).logits.double()
    if not bool(expected.isfinite().all()):
        return None  # neither are those of the source
    error = float((actual - expected).abs().max()) / max(1e-3, float(expected.std()))
    close = error < (5e-3 if "not exact" not in plan.correction else 0.1)
    return None if close else f"other than its mask: {error:.2g} standard deviations"
