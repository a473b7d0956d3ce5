"""Commands that are stopped, run out of disk or race at random moments; `make crash` prints a line for each verdict.

Every trial is a process forked from this one, which has imported everything, in a folder of its own. Its result is
compared with that of an undisturbed run: the files that two undisturbed runs have in common.
"""

from __future__ import annotations

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
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # a fork has the locks of its parent's threads, and not the threads

import torch

import slimstate
import tiny

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


@dataclass(frozen=True)
class Trial:
    """A command line that writes to the folder `out`, and the flags that continue it after a stop."""

    words: tuple[str, ...]
    resume: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stage:
    """The inputs of all trials, a tiny model, its cut, a text and records, and the folder for their outputs."""

    root: Path

    @property
    def place(self) -> Path:
        return self.root / "place"

    def trials(self) -> dict[str, Trial]:
        model, cut, text, records = (str(self.root / name) for name in ("model", "cut", "text.txt", "records"))
        out = str(self.place / "out")
        data, measured = ("--data", text), ("--text", text, "--length", "64", "--max-tokens", "512")
        calibrated = ("--key-dim", "8", *data, *TINY)
        swept = ("--text", text, "--text-length", "64", "--max-tokens", "512", "--methods", "l1,drrqr")
        return {
            "prune": Trial(("prune", model, *calibrated, "--out", out)),
            "sweep": Trial(("sweep", model, *data, *TINY, *swept, "--key-dims", "12,8", "--out", out)),
            "reconstruct": Trial(("reconstruct", cut, "--teacher", model, *data, *LAYERS, "--out", out)),
            "distill": Trial(("reconstruct", cut, "--teacher", model, *data, *LAYERS, "--distill", "3", "--out", out)),
            "recover": Trial(("recover", cut, "--teacher", model, *data, *STEPS, "--out", out), ("--resume",)),
            "train": Trial(("train", str(self.root / "config.json"), *data, *STEPS, "--out", out), ("--resume",)),
            "run": Trial(("run", str(self.root / "recipe.toml"), "--out", out)),
            "analyze": Trial(("analyze", model, cut, "--text", text, "--length", "64", "--skip", "16", "--out", out)),
            "eval": Trial(("eval", cut, *measured, "--out", f"{out}/evaluation.json")),
            "report": Trial(("report", records, "--out", f"{out}/page.html")),
        }

    def clear(self) -> None:
        shutil.rmtree(self.place, ignore_errors=True)
        self.place.mkdir()


@dataclass(frozen=True)
class Ended:
    """How a trial ended: its exit code, its output, and the seconds since the signal."""

    code: int
    output: str
    seconds: float

    @property
    def lines(self) -> list[str]:
        return [line for line in self.output.splitlines() if line.startswith("slimstate: ")]


@dataclass
class Suite:
    stage: Stage
    seed: int
    verdicts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    reference: dict[str, dict[str, str]] = field(default_factory=dict)
    duration: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)

    def learn(self, name: str) -> None:
        """Note the results of an undisturbed command, and how long it takes."""
        results = []
        for _ in range(2):
            self.stage.clear()
            ended = self.finish(self.start(self.stage.trials()[name].words))
            assert ended.code == 0, ended.output
            results.append(contents(self.stage.place))
            self.duration[name] = ended.seconds
        assert results[0].keys() == results[1].keys()
        self.reference[name] = {path: digest for path, digest in results[0].items() if results[1][path] == digest}

    def start(self, words: tuple[str, ...]) -> tuple[int, Path]:
        """Run a command in a process of its own; its output goes to a file."""
        handle, output = tempfile.mkstemp(dir=self.stage.root / "output")
        child = os.fork()
        if child == 0:
            for number, name in ((1, "stdout"), (2, "stderr")):
                os.dup2(handle, number)
                setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115 - in a test they are others
            os._exit(command(words))
        os.close(handle)
        return child, Path(output)

    def finish(self, started: tuple[int, Path], since: float | None = None) -> Ended:
        child, output = started
        since = time.monotonic() if since is None else since
        while True:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                break
            if time.monotonic() - since > TIMEOUT:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return Ended(-1, output.read_text() + "\nit hung", TIMEOUT)
            time.sleep(0.002)
        return Ended(os.waitstatus_to_exitcode(status), output.read_text(), time.monotonic() - since)

    def verdict(self, what: str, wrongs: list[str], output: str) -> None:
        self.verdicts[f"{what}: {'wrong' if wrongs else 'right'}"] += 1
        if wrongs:
            self.failures.append(f"{what}: {'; '.join(wrongs)}\n{output}")
            print(f"\n{self.failures[-1]}", flush=True)

    def kill(self, name: str, number: signal.Signals, moment: float) -> None:
        """Send a signal at a moment, then run the same command again."""
        self.stage.clear()
        started = self.start(self.stage.trials()[name].words)
        time.sleep(moment)
        sent = time.monotonic()
        os.kill(started[0], number)
        ended = self.finish(started, sent)
        early = moment < STARTING and number != signal.SIGKILL
        if early and ended.code == -number:  # before it handles signals
            ended = Ended(128 + number, STOPPED, ended.seconds)
        wrongs = list(self._after(name, number, ended))
        wrongs += self.again(name)
        self.verdict(f"{name} {number.name}", wrongs, f"after {moment:.3f} s, code {ended.code}: {ended.output}")

    def _after(self, name: str, number: signal.Signals, ended: Ended) -> Iterator[str]:
        expected = -number if number == signal.SIGKILL else 128 + number
        if ended.code not in (0, expected):
            yield f"exit code {ended.code}"
        if "Traceback" in ended.output:
            yield "a traceback"
        if number != signal.SIGKILL:
            if ended.seconds > MAX_SECONDS:
                yield f"{ended.seconds:.1f} s to the end"
            if ended.code != 0 and not (len(ended.lines) == 1 and ended.lines[0].startswith(STOPPED)):
                yield "no line, or more than one"
            kept = name == "run" or any(ending in ended.output for ending in RUN_FOLDERS)
            yield from (f"left {path}" for path in leftovers(self.stage.place, run_folders=not kept))
        for path, digest in contents(self.stage.place).items():
            whole = self.reference[name].get(path, digest)
            unfinished = any(ending in path for ending in RUN_FOLDERS)
            if name in WRITING_MODELS and not unfinished and digest != whole:
                yield f"{path} is not what it should be"

    def again(self, name: str) -> list[str]:
        """Run the same command again, continuing where that takes a flag; its result must be the undisturbed one."""
        trial, out = self.stage.trials()[name], self.stage.place / "out"
        force = ("--force",) if trial.words[0] in WRITING_MODELS and out.exists() else ()
        words = (*trial.words, *force, *trial.resume)
        ended = self.finish(self.start(words))
        if ended.code != 0:
            return [f"again: code {ended.code}: {ended.output[-800:]}"]
        wrongs = [f"again: {path} differs" for path in self.different(name)]
        return wrongs + [f"again: left {path}" for path in leftovers(self.stage.place)]

    def different(self, name: str) -> list[str]:
        """Return the files that differ from those of an undisturbed command, or are missing."""
        files = contents(self.stage.place)
        return [path for path, digest in self.reference[name].items() if files.get(path) != digest]

    def full_disk(self, name: str, share: float) -> None:
        """Run on a file system that may be too small, and then on one that is large enough."""
        self.stage.clear()
        needed = sum(self.sizes(name))
        size = max(4096, int(share * needed))
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(self.stage.place)]
        subprocess.run(mount, check=True)
        try:
            ended = self.finish(self.start(self.stage.trials()[name].words))
            wrongs = [] if ended.code in (0, 2) else [f"exit code {ended.code}"]
            wrongs += ["a traceback"] * ("Traceback" in ended.output)
            wrongs += ["no line, or more than one"] * (ended.code != 0 and len(ended.lines) != 1)
            kept = name == "run" or "checkpoint-" in ended.output or ".reconstruction" in ended.output
            wrongs += [f"left {path}" for path in leftovers(self.stage.place, run_folders=not kept)]
            subprocess.run(["mount", "-o", "remount,size=1g", str(self.stage.place)], check=True)
            wrongs += self.again(name)
        finally:
            subprocess.run(["umount", str(self.stage.place)], check=True)
        self.verdict(f"{name} full disk", wrongs, f"{size} of {needed} bytes, code {ended.code}: {ended.output}")

    def sizes(self, name: str) -> Iterator[int]:
        """Yield the bytes of the results, and more where a command keeps a run folder."""
        self.again(name)
        more = 3 if name in ("reconstruct", "recover", "train", "run") else 1
        yield from (more * path.stat().st_size + 4096 for path in self.stage.place.rglob("*"))
        self.stage.clear()

    def at_once(self, name: str, more: tuple[str, ...], pause: float) -> None:
        """Run a command twice on one output: both end properly, and the result is complete."""
        self.stage.clear()
        words = (*self.stage.trials()[name].words, *more)
        first = self.start(words)
        time.sleep(pause)
        second = self.start(words)
        ended = [self.finish(first), self.finish(second)]
        wrongs = [f"exit codes {[one.code for one in ended]}"] * (sorted(one.code for one in ended)[0] != 0)
        for one in ended:
            wrongs += [f"exit code {one.code}"] * (one.code not in (0, 2))
            wrongs += ["a traceback"] * ("Traceback" in one.output)
            wrongs += ["no line, or more than one"] * (one.code == 2 and len(one.lines) != 1)
        wrongs += [f"{path} differs" for path in self.different(name)]
        wrongs += [f"left {path}" for path in leftovers(self.stage.place)]
        self.verdict(f"{name} twice", wrongs, "\n".join(one.output for one in ended))

    def changing(self, moment: float) -> None:
        """Replace a source while it is cut: it is refused, or cut as it was before or after."""
        self.stage.clear()
        source, other = self.stage.root / "source", self.stage.root / "other"
        shutil.rmtree(source, ignore_errors=True)
        shutil.copytree(self.stage.root / "model", source)
        words = ["prune", str(source), *self.stage.trials()["prune"].words[2:]]
        started = self.start(tuple(words))
        time.sleep(moment)
        for path in sorted(other.glob("*.safetensors")):
            shutil.copyfile(path, source / path.name)
        ended = self.finish(started)
        wrongs = [] if ended.code in (0, 2) else [f"exit code {ended.code}"]
        wrongs += ["a traceback"] * ("Traceback" in ended.output)
        if ended.code == 0 and not any(self._is_cut_of(whole) for whole in (self.stage.root / "model", other)):
            wrongs.append("a mixture of two models")
        wrongs += [f"left {path}" for path in leftovers(self.stage.place)]
        self.verdict("a source that changes", wrongs, f"after {moment:.3f} s, code {ended.code}: {ended.output}")

    def _is_cut_of(self, model: Path) -> bool:
        """Return whether the plan beside the weights cuts this model into exactly these weights."""
        cut, twin = self.stage.place / "out", self.stage.root / "twin"
        shutil.rmtree(twin, ignore_errors=True)
        plan = self.stage.root / "plan.json"
        values = json.loads((cut / "slimstate_plan.json").read_text())
        values["model"]["fingerprint"] = self.prints[model.name]
        plan.write_text(json.dumps(values))
        ended = self.finish(self.start(("prune", str(model), "--apply", str(plan), "--out", str(twin))))
        weights = {path.name: path.read_bytes() for path in twin.glob("*.safetensors")}
        return ended.code == 0 and weights == {path.name: path.read_bytes() for path in cut.glob("*.safetensors")}

    @property
    def prints(self) -> Mapping[str, str]:
        from slimstate.checkpoints.reader import Checkpoint

        return {name: Checkpoint.open(self.stage.root / name).fingerprint for name in ("model", "other")}


def command(words: tuple[str, ...]) -> int:
    """Run a command in this process, as if it had just been started."""
    from slimstate.cli import main
    from slimstate.system.interruption import STOP

    signal.signal(signal.SIGINT, signal.default_int_handler)
    STOP.listen()
    sys.argv = ["slimstate", *words]
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


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


def build(root: Path) -> Stage:
    """Build the inputs of the trials. Commands are forked, so everything is imported before."""
    assert all(hasattr(slimstate, name) for name in slimstate.__all__)
    stage, variant = Stage(root), tiny.VARIANTS["delta_net-plain"]
    for name in ("output", "place", "records"):
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
    text = str(root / "text.txt")
    (root / "recipe.toml").write_text(RECIPE.replace("MODEL", str(root / "model")).replace("TEXT", text))
    suite = Suite(stage, 0)
    words = ("prune", str(root / "model"), "--key-dim", "12", "--method", "l1", "--out", str(root / "cut"))
    assert suite.finish(suite.start(words)).code == 0
    measured = ("--text", text, "--length", "64", "--max-tokens", "512")
    words = ("eval", str(root / "cut"), *measured, "--out", str(root / "records" / "e.json"))
    assert suite.finish(suite.start(words)).code == 0
    return stage


def warm(stage: Stage, names: list[str]) -> None:
    """Run the commands once in this process, so that trials do not spend their time on imports."""
    torch.set_num_threads(1)
    streams = [os.dup(number) for number in (1, 2)]
    with (stage.root / "output" / "warm").open("w") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        for name in names:
            stage.clear()
            assert command(stage.trials()[name].words) == 0
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream, number)


def kills(suite: Suite, trials: int, names: list[str]) -> None:
    for trial in range(trials):
        name = names[trial % len(names)]
        number = suite.chance.choice([signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
        suite.kill(name, number, suite.chance.uniform(0, 1.05 * suite.duration[name]))


def full_disks(suite: Suite, trials: int, names: list[str]) -> None:
    if os.geteuid() != 0:
        print("full disks: skipped, because mounting one takes root")
        return
    for trial in range(trials):
        suite.full_disk(names[trial % len(names)], suite.chance.uniform(0, 1))


def races(suite: Suite, trials: int, names: list[str]) -> None:
    for trial in range(trials):
        name = names[trial % len(names)]
        more: tuple[str, ...] = ()
        if name in ("recover", "train"):
            more = suite.chance.choice([(), ("--resume",), ("--force",)])
        suite.at_once(name, more, suite.chance.choice([0.0, suite.chance.uniform(0, suite.duration[name])]))


def changes(suite: Suite, trials: int, names: list[str]) -> None:
    for _ in range(trials):
        suite.changing(suite.chance.uniform(0, suite.duration["prune"]))


CLASSES: dict[str, Callable[[Suite, int, list[str]], None]] = {
    "kills": kills, "full": full_disks, "races": races, "changes": changes,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=500, help="kills; a fifth as many of each other class")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--classes", default=",".join(CLASSES))
    parser.add_argument("--commands", default="", help="separated by commas; default: all")
    options = parser.parse_args()
    os.environ.update(CUDA_VISIBLE_DEVICES="", TOKENIZERS_PARALLELISM="false")
    with tempfile.TemporaryDirectory(prefix="slimstate-crash-") as folder:
        suite = Suite(build(Path(folder)), options.seed)
        names = [name for name in options.commands.split(",") if name] or list(suite.stage.trials())
        known = names if "prune" in names else [*names, "prune"]
        warm(suite.stage, known)
        for name in known:
            suite.learn(name)
            print(f"{name}: {suite.duration[name]:.2f} s, {len(suite.reference[name])} files that do not vary")
        for kind in options.classes.split(","):
            CLASSES[kind](suite, options.trials if kind == "kills" else -(-options.trials // 5), names)
            print(f"{kind}: {suite.verdicts.total()} trials so far, {len(suite.failures)} of them wrong", flush=True)
        for verdict, count in sorted(suite.verdicts.items()):
            print(f"{count:5d}  {verdict}")
    return 1 if suite.failures else 0


if __name__ == "__main__":
    sys.exit(main())
