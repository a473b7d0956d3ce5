"""Commands that are stopped, run out of disk or race at random moments; `make crash` prints a line for each verdict.

Every trial is a process forked from this one, which has imported everything, in a folder of its own. Its result is
compared with that of an undisturbed run: the files that two undisturbed runs have in common.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # a fork has the locks of its parent's threads, and not the threads

import torch

import slimstate
import tiny
from command import quiet
from forking import Ended, Fork
from slimstate.checkpoints.reader import Checkpoint
from slimstate.cli import main as slimstate_main
from slimstate.system.interruption import STOP

STOPPED = "slimstate: stopped; "
MAX_SECONDS = 2.0  # from a signal to the end
STARTING = 0.05  # seconds in which a process may not handle signals yet
TIMEOUT = 120.0  # seconds
VOLATILE = ("seconds", "tokens_per_second")
TINY = ("--samples", "4", "--length", "64")
LAYERS = ("--steps", "4", "--batch", "2", "--samples", "10", "--length", "64")
RUN_FOLDERS = (".training", ".reconstruction", ".distillation")
WRITING_MODELS = ("prune", "reconstruct", "distill", "recover", "train")
STEPS = ("--steps", "4", "--save-every", "1", "--batch-size", "4", "--length", "64", "--report-to", "none")
RECIPE = """
title = "A toy"
about = "A cut, its measures and a page"
steps = [
  {command = "prune", each = {key_dim = "key_dims"}, model = "MODEL", key_dim = "{key_dim}", method = "l1",
   out = "{out}/cut-{key_dim}"},
  {command = "recover", model = "{out}/cut-8", teacher = "MODEL", data = "TEXT", steps = 4, save_every = 1,
   batch_size = 4, length = 64, report_to = "none", out = "{out}/recovered"},
  {command = "eval", model = "{out}/cut-8", text = "TEXT", length = 64, max_tokens = 512,
   out = "{out}/evaluation.json"},
  {command = "report", folder = "{out}"},
]
[paper]
key_dims = [12, 8]
[small]
""".replace(",\n   ", ", ")  # a table in TOML is one line


@dataclass
class Suite:
    """Trials of commands on inputs in a folder; `chance` draws their moments.

    `reference` has the digests of undisturbed results, and `duration` their seconds.
    """

    root: Path
    chance: random.Random
    verdicts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    reference: dict[str, dict[str, str]] = field(default_factory=dict)
    duration: dict[str, float] = field(default_factory=dict)

    @property
    def place(self) -> Path:
        return self.root / "place"

    def commands(self) -> dict[str, tuple[str, ...]]:
        model, cut, text, records = (str(self.root / name) for name in ("model", "cut", "text.txt", "records"))
        out = str(self.place / "out")
        data, measured = ("--data", text), ("--text", text, "--length", "64", "--max-tokens", "512")
        layers = ("reconstruct", cut, "--teacher", model, *data, *LAYERS, "--out", out)
        swept = ("--text", text, "--text-length", "64", "--max-tokens", "512", "--methods", "l1,drrqr")
        return {
            "prune": ("prune", model, "--key-dim", "8", *data, *TINY, "--out", out),
            "sweep": ("sweep", model, *data, *TINY, *swept, "--key-dims", "12,8", "--out", out),
            "reconstruct": layers,
            "distill": (*layers, "--distill", "3"),
            "recover": ("recover", cut, "--teacher", model, *data, *STEPS, "--out", out),
            "train": ("train", str(self.root / "config.json"), *data, *STEPS, "--out", out),
            "run": ("run", str(self.root / "recipe.toml"), "--out", out),
            "analyze": ("analyze", model, cut, "--text", text, "--length", "64", "--skip", "16", "--out", out),
            "eval": ("eval", cut, *measured, "--out", f"{out}/evaluation.json"),
            "report": ("report", records, "--out", f"{out}/page.html"),
        }

    def clear(self) -> None:
        shutil.rmtree(self.place, ignore_errors=True)
        self.place.mkdir()

    def learn(self, name: str) -> None:
        """Note the results of an undisturbed command, and how long it takes after its imports."""
        self.clear()
        quiet(*self.commands()[name])
        results = []
        for _ in range(2):
            ended = self.run(name)
            assert ended.code == 0, ended.errors
            results.append(contents(self.place))
            self.duration[name] = ended.seconds
        assert results[0].keys() == results[1].keys()
        self.reference[name] = {path: digest for path, digest in results[0].items() if results[1][path] == digest}

    def start(self, words: tuple[str, ...]) -> Fork:
        """Run a command in a process of its own, as if it had just been started."""

        def work() -> None:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            STOP.listen()
            sys.argv = ["slimstate", *words]
            slimstate_main()

        return Fork.start(work, Path(tempfile.mktemp(dir=self.root / "errors")))

    def run(self, name: str) -> Ended:
        self.clear()
        return self.start(self.commands()[name]).wait(TIMEOUT)

    def verdict(self, what: str, problems: list[str], details: str) -> None:
        self.verdicts[f"{what}: {'wrong' if problems else 'right'}"] += 1
        if problems:
            self.failures.append(f"{what}: {'; '.join(problems)}\n{details}")
            print(f"\n{self.failures[-1]}", flush=True)

    def left(self, name: str, ended: Ended) -> list[str]:
        """Return what lies around after an error; a run folder may stay where a message names it."""
        named = name == "run" or any(word in ended.errors for word in (*RUN_FOLDERS, "checkpoint-"))
        return [f"left {path}" for path in leftovers(self.place, run_folders=not named)]

    def kill(self, name: str, number: signal.Signals, moment: float) -> None:
        """Send a signal at a moment, then run the same command again."""
        self.clear()
        process = self.start(self.commands()[name])
        time.sleep(moment)
        sent = time.monotonic()
        os.kill(process.pid, number)
        ended = process.wait(TIMEOUT, sent)
        if moment < STARTING and number != signal.SIGKILL and ended.code == -number:  # before it handles signals
            ended = replace(ended, code=128 + number, errors=STOPPED)
        problems = [*self._after(name, number, ended), *self.again(name)]
        self.verdict(f"{name} {number.name}", problems, f"after {moment:.3f} s, code {ended.code}: {ended.errors}")

    def _after(self, name: str, number: signal.Signals, ended: Ended) -> Iterator[str]:
        if number == signal.SIGKILL:
            yield from problems_of(ended, (0, -number), lines=None)
        else:
            yield from problems_of(ended, (0, 128 + number), lines=1)
            yield from self.left(name, ended)
            if ended.seconds > MAX_SECONDS:
                yield f"{ended.seconds:.1f} s to the end"
            if ended.code != 0 and not all(line.startswith(STOPPED) for line in ended.own_lines):
                yield "another line than that of a stop"
        for path, digest in contents(self.place).items():
            unfinished = any(ending in path for ending in RUN_FOLDERS)
            if name in WRITING_MODELS and not unfinished and digest != self.reference[name].get(path, digest):
                yield f"{path} is not what it should be"

    def again(self, name: str) -> list[str]:
        """Run the same command again, continuing where that takes a flag; its result must be the undisturbed one."""
        words = self.commands()[name]
        force = ("--force",) if words[0] in (*WRITING_MODELS, "analyze") and (self.place / "out").exists() else ()
        resume = ("--resume",) if name in ("recover", "train") else ()
        ended = self.start((*words, *force, *resume)).wait(TIMEOUT)
        if ended.code != 0:
            return [f"again: code {ended.code}: {ended.errors[-800:]}"]
        return [f"again: {problem}" for problem in self.differences(name)]

    def differences(self, name: str) -> list[str]:
        files = contents(self.place)
        differing = [path for path, digest in self.reference[name].items() if files.get(path) != digest]
        return [f"{path} differs" for path in differing] + [f"left {path}" for path in leftovers(self.place)]

    def full_disk(self, name: str, share: float) -> None:
        """Run on a file system that may be too small, and then on one that is large enough."""
        assert self.run(name).code == 0
        runs = 3 if name in ("reconstruct", "recover", "train", "run") else 1  # those keep a run folder
        needed = sum(runs * path.stat().st_size + 4096 for path in self.place.rglob("*"))
        self.clear()
        size, place = max(4096, int(share * needed)), str(self.place)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", place], check=True)
        try:
            ended = self.start(self.commands()[name]).wait(TIMEOUT)
            problems = [*problems_of(ended, (0, 2), lines=1), *self.left(name, ended)]
            subprocess.run(["mount", "-o", "remount,size=1g", place], check=True)
            problems += self.again(name)
        finally:
            subprocess.run(["umount", place], check=True)
        self.verdict(f"{name} full disk", problems, f"{size} of {needed} bytes, code {ended.code}: {ended.errors}")

    def race(self, name: str, options: tuple[str, ...], pause: float) -> None:
        """Run a command twice on one output: one succeeds, both end properly, and the result is complete."""
        self.clear()
        words = (*self.commands()[name], *options)
        first = self.start(words)
        time.sleep(pause)
        ended = [process.wait(TIMEOUT) for process in (first, self.start(words))]
        problems = [] if any(each.code == 0 for each in ended) else ["none succeeded"]
        problems += [problem for each in ended for problem in problems_of(each, (0, 2), lines=1)]
        problems += self.differences(name)
        self.verdict(f"{name} twice", problems, "\n".join(each.errors for each in ended))

    def change_source(self, moment: float) -> None:
        """Replace a source while it is cut: it is refused, or cut as it was before or after."""
        self.clear()
        model, source, other = (self.root / name for name in ("model", "source", "other"))
        shutil.rmtree(source, ignore_errors=True)
        shutil.copytree(model, source)
        process = self.start(("prune", str(source), *self.commands()["prune"][2:]))
        time.sleep(moment)
        for path in sorted(other.glob("*.safetensors")):
            shutil.copyfile(path, source / path.name)
        ended = process.wait(TIMEOUT)
        problems = [*problems_of(ended, (0, 2), lines=1), *(f"left {path}" for path in leftovers(self.place))]
        if ended.code == 0 and not any(self._is_cut_of(whole) for whole in (model, other)):
            problems.append("a mixture of two models")
        self.verdict("a source that changes", problems, f"after {moment:.3f} s, code {ended.code}: {ended.errors}")

    def _is_cut_of(self, model: Path) -> bool:
        """Return whether the plan beside the weights cuts this model into exactly these weights."""
        cut, twin, plan = self.place / "out", self.root / "twin", self.root / "plan.json"
        shutil.rmtree(twin, ignore_errors=True)
        values = json.loads((cut / "slimstate_plan.json").read_text())
        values["model"]["fingerprint"] = Checkpoint.open(model).fingerprint
        plan.write_text(json.dumps(values))
        ended = self.start(("prune", str(model), "--apply", str(plan), "--out", str(twin))).wait(TIMEOUT)
        weights = [{path.name: path.read_bytes() for path in folder.glob("*.safetensors")} for folder in (twin, cut)]
        return ended.code == 0 and weights[0] == weights[1]


def problems_of(ended: Ended, codes: tuple[int, ...], lines: int | None) -> Iterator[str]:
    """Yield what is wrong with an end: other exit codes, a traceback, or another number of lines with an error."""
    if ended.code not in codes or ended.timed_out:
        yield f"exit code {ended.code}"
    if "Traceback" in ended.errors:
        yield "a traceback"
    if ended.code != 0 and lines is not None and len(ended.own_lines) != lines:
        yield f"{len(ended.own_lines)} lines"


def contents(folder: Path) -> dict[str, str]:
    """Return a digest of every file by path, without times."""
    digests = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            data = path.read_bytes()
            if path.suffix == ".json":
                with suppress(ValueError):  # a file that is being written
                    data = json.dumps(_lasting(json.loads(data))).encode()
            digests[str(path.relative_to(folder))] = hashlib.sha256(data).hexdigest()
    return digests


def _lasting(value: object) -> object:
    if isinstance(value, dict):
        return {key: _lasting(entry) for key, entry in value.items() if key not in VOLATILE}
    return [_lasting(entry) for entry in value] if isinstance(value, list) else value


def leftovers(folder: Path, *, run_folders: bool = True) -> list[str]:
    """Return hidden files, empty folders, and folders of unfinished runs."""
    paths = []
    for path in folder.rglob("*"):
        unfinished = run_folders and path.name.endswith(RUN_FOLDERS)
        in_one = any(part.endswith(RUN_FOLDERS) for part in path.relative_to(folder).parts)
        empty = path.is_dir() and not any(path.iterdir()) and not in_one
        if path.name.startswith(".") or unfinished or empty:
            paths.append(str(path.relative_to(folder)))
    return paths


def build(root: Path) -> None:
    """Build the inputs of the trials. Commands are forked, so everything is imported before."""
    assert all(hasattr(slimstate, name) for name in slimstate.__all__)
    variant, text = tiny.VARIANTS["delta_net-plain"], str(root / "text.txt")
    for name in ("errors", "place", "records"):
        (root / name).mkdir()
    tiny.save(tiny.build(variant), root / "model", "100KB")
    torch.manual_seed(1)
    model = tiny.build(variant)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.01 * torch.randn_like(weight))
    tiny.save(model, root / "other", "100KB")
    (root / "text.txt").write_text(tiny.text())
    config = json.loads((root / "model" / "config.json").read_text())
    (root / "config.json").write_text(json.dumps({**config, "vocab_size": 300}))
    (root / "recipe.toml").write_text(RECIPE.replace("MODEL", str(root / "model")).replace("TEXT", text))
    quiet("prune", root / "model", "--key-dim", 12, "--method", "l1", "--out", root / "cut")
    measured = ("--text", text, "--length", 64, "--max-tokens", 512)
    quiet("eval", root / "cut", *measured, "--out", root / "records" / "e.json")


def kill(suite: Suite, name: str) -> None:
    number = suite.chance.choice([signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
    suite.kill(name, number, suite.chance.uniform(0, 1.05 * suite.duration[name]))


def race(suite: Suite, name: str) -> None:
    options = suite.chance.choice([(), ("--resume",), ("--force",)]) if name in ("recover", "train") else ()
    suite.race(name, options, suite.chance.choice([0.0, suite.chance.uniform(0, suite.duration[name])]))


CLASSES: dict[str, Callable[[Suite, str], None]] = {
    "kills": kill,
    "full": lambda suite, name: suite.full_disk(name, suite.chance.uniform(0, 1)),
    "races": race,
    "changes": lambda suite, _: suite.change_source(suite.chance.uniform(0, suite.duration["prune"])),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=500, help="kills; a fifth as many of each other class")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--classes", default=",".join(CLASSES))
    parser.add_argument("--commands", default="", help="separated by commas; default: all")
    options = parser.parse_args()
    os.environ.update(CUDA_VISIBLE_DEVICES="", TOKENIZERS_PARALLELISM="false")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="slimstate-crash-") as folder:
        build(Path(folder))
        suite = Suite(Path(folder), random.Random(options.seed))
        names = [name for name in options.commands.split(",") if name] or list(suite.commands())
        for name in names if "prune" in names else [*names, "prune"]:
            suite.learn(name)
            print(f"{name}: {suite.duration[name]:.2f} s, {len(suite.reference[name])} files that do not vary")
        for kind in options.classes.split(","):
            if kind == "full" and os.geteuid() != 0:
                print("full disks: skipped, because mounting one takes root")
                continue
            for trial in range(options.trials if kind == "kills" else -(-options.trials // 5)):
                CLASSES[kind](suite, names[trial % len(names)])
            print(f"{kind}: {suite.verdicts.total()} trials so far, {len(suite.failures)} of them wrong", flush=True)
        for verdict, count in sorted(suite.verdicts.items()):
            print(f"{count:5d}  {verdict}")
    return 1 if suite.failures else 0


if __name__ == "__main__":
    sys.exit(main())
