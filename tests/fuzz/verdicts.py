"""What a command may do to a folder, whatever it was given."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

import safetensors
import torch

from tiny_model import tokenizer

INDEX = "model.safetensors.index.json"
CODES, LONGEST, SECONDS = (0, 2, 3), 500, 10.0


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a command ended: its exit code (negative: the signal), seconds of wall and of processor, what it said."""

    code: int
    wall: float
    processor: float
    errors: str
    timed_out: bool = False


def complaint(ended: Ended) -> str | None:
    """What is wrong with how it ended, in a word or two and a detail."""
    if ended.timed_out:
        return f"hang: {ended.wall:.0f} s"
    lines = ended.errors.splitlines()
    last = lines[-1] if lines else ""
    if "Traceback (most recent call last)" in ended.errors:
        return f"traceback: {last}"
    if "panicked at" in ended.errors:
        return f"panic: {last}"
    if ended.code not in CODES:
        return f"exit code {ended.code}: {last}"
    if ended.processor > SECONDS:
        return f"slow: {ended.processor:.0f} s of processor"
    if any(len(line) > LONGEST for line in lines):
        return f"long line: {max(map(len, lines))} characters, {max(lines, key=len)[:100]}"
    told = sum(line.startswith("slimstate: ") for line in lines)
    if ended.code and (told != 1 or not last.startswith("slimstate: ")):
        return f"not one line: {last}"
    return None


def inventory(folder: Path) -> dict[str, str]:
    """Every file under a folder and a digest of it; special files by their type."""
    found = {}
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(place) / name
            mode = path.lstat().st_mode
            key = str(path.relative_to(folder))
            if stat.S_ISREG(mode):
                found[key] = hashlib.sha256(path.read_bytes()).hexdigest()
            else:
                found[key] = os.readlink(path) if stat.S_ISLNK(mode) else str(stat.S_IFMT(mode))
    return found


def touched(before: dict[str, str], after: dict[str, str], outs: frozenset[str]) -> str | None:
    """What changed that is neither one of the outputs, nor in one, nor a folder made for one."""
    for name in sorted(before.keys() | after.keys()):
        made = name not in before
        allowed = any(f"{name}/".startswith(f"{out}/") or (made and out.startswith(f"{name}/")) for out in outs)
        if before.get(name) != after.get(name) and not allowed:
            what = "left" if name not in before else "gone" if name not in after else "changed"
            return f"{what}: {name}"
    return None


def bare(folder: Path) -> Path:
    """The weights and the config of a model, with a tokenizer that loads."""
    place = Path(tempfile.mkdtemp())
    tokenizer().save_pretrained(place)
    for name in ("config.json", *(path.name for path in folder.glob("*.safetensors"))):
        shutil.copyfile(folder / name, place / name)
    if (folder / INDEX).exists():
        index = json.loads((folder / INDEX).read_text())
        (place / INDEX).write_text(json.dumps({"metadata": {}, **index}))
    return place


def misfit(source: Path, out: Path) -> str | None:
    """How a written model differs from its source with the dropped channels masked; None where it does not."""
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
    ids = torch.randint(0, 200, (1, 40), generator=torch.Generator().manual_seed(0))
    source, out = bare(source), bare(out)
    try:
        checkpoint, runtime = Checkpoint.open(source), load(source, device="cpu")
    except SlimstateError:
        return None  # the source itself cannot be run, and is no worse for the cut
    with torch.inference_mode():
        with masked(runtime.model, checkpoint.mixers, plan.selections, rescaled=not plan.corrected):
            expected = runtime.model(input_ids=ids, use_cache=False).logits.double()
        got = load(out, device="cpu").model(input_ids=ids, use_cache=False).logits.double()
    if not bool(expected.isfinite().all()):
        return None  # the source itself runs to no numbers
    off = float((got - expected).abs().max()) / max(1e-3, float(expected.std()))
    exact = "not exact" not in plan.correction
    return f"other than its mask: {off:.2g} standard deviations" if not off < (5e-3 if exact else 0.1) else None
