"""Run commands on damaged input and judge each: `python tests/fuzz/run.py --cases 4000 --seed 7`.

Everything is drawn from the seed. A case is named CLASS:NUMBER; `--only CLASS:NUMBER` repeats it and shows its errors.
"""

import argparse
import os
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from random import Random

os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
sys.path[:0] = [str(Path(__file__).parents[1])]

import torch  # noqa: E402

from forking import Ended, Fork  # noqa: E402
from fuzz.classes import CLASSES, Case  # noqa: E402
from fuzz.subjects import build  # noqa: E402
from fuzz.verdicts import MAX_SECONDS, bad_end, difference, inventory, unexpected_change  # noqa: E402
from slimstate import cli  # noqa: E402
from slimstate.models.prepare import prepare_fla  # noqa: E402

TIMEOUT = 4 * MAX_SECONDS  # other work may share the machine
MAX_ADDRESSES = 24 * 2**30  # bytes


@dataclass(frozen=True, kw_only=True)
class Running:
    """A case whose command runs; `before` are the files of its folder."""

    name: str
    case: Case
    folder: Path
    before: dict[str, str]
    process: Fork

    @classmethod
    def start(cls, name: str, seed: int, seeds: Path, root: Path) -> "Running":
        """Build the folder of a case and start its command there."""
        kind, folder = name.partition(":")[0], root / name.replace(":", "-")
        for inner in ("work", "outside", "tmp", "text"):
            (folder / inner).mkdir(parents=True)
        (folder / "outside" / "secret.txt").write_text("nobody's business\n")
        (folder / "outside" / "other.safetensors").write_bytes(b"precious")
        shutil.copytree(seeds / "text", folder / "text", dirs_exist_ok=True)
        if kind == "text":
            shutil.rmtree(folder / "text")
        case = CLASSES[kind](Random(f"{seed}:{name}"), seeds, folder)

        def command() -> None:
            resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESSES, MAX_ADDRESSES))
            os.chdir(folder)
            os.environ.update(TMPDIR=str(folder / "tmp"), HOME=str(root), XDG_CACHE_HOME=str(root / "cache"))
            tempfile.tempdir = None
            sys.argv = ["slimstate", *case.words]
            cli.main()

        before = inventory(folder)
        process = Fork.start(command, root / f"{folder.name}.stderr")
        return cls(name=name, case=case, folder=folder, before=before, process=process)

    def judge(self, ended: Ended) -> tuple[bool, str, str]:
        """Return whether the end is good, the verdict in a word, and its reason."""
        allowed = self.case.outputs(ended.code == 0)
        problem = bad_end(ended) or unexpected_change(self.before, inventory(self.folder), allowed)
        out = self.folder / (self.case.out or "")
        if problem is None and ended.code == 0 and self.case.model is not None and (out / "config.json").exists():
            problem = _compare(self.folder / self.case.model, out)
        last = ended.errors.splitlines()[-1] if ended.errors.strip() else ""
        return (True, f"exit {ended.code}", last) if problem is None else (False, problem.split(":")[0], problem)


def _compare(source: Path, out: Path) -> str | None:
    """Return how a written model differs from its masked source, computed in a process of its own."""

    def compare() -> None:
        tempfile.tempdir = str(out.parent)
        print(difference(source, out) or "", file=sys.stderr)

    ended = Fork.start(compare, out.parent / "difference").wait(TIMEOUT)
    lines = ended.errors.strip().splitlines()
    return (lines[-1] if lines else None) if ended.code == 0 else f"the written model does not load: {lines[-1:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--classes", default=",".join(CLASSES))
    parser.add_argument("--only", help="CLASS:NUMBER, and more of them separated by commas")
    parser.add_argument("--keep", type=Path, help="a folder that keeps the files of all cases")
    options = parser.parse_args()
    chosen = options.classes.split(",")
    names = [f"{chosen[i % len(chosen)]}:{i // len(chosen)}" for i in range(options.cases)]
    names = names if options.only is None else options.only.split(",")
    torch.set_num_threads(1)
    prepare_fla()
    with tempfile.TemporaryDirectory(prefix="slimstate-fuzz-") as scratch:
        root = options.keep or Path(scratch)
        root.mkdir(exist_ok=True)
        built = Fork.start(lambda: build(root / "subjects"), root / "subjects.stderr").wait(600)
        if built.code:
            print(built.errors)
            return 1
        return run_cases(names, options, root)


def run_cases(names: list[str], options: argparse.Namespace, root: Path) -> int:
    """Run the cases, print those that end badly, and count the verdicts by class."""
    started, waiting, running = time.monotonic(), names[::-1], []
    counts: dict[str, Counter[str]] = {}
    bad = 0
    while waiting or running:
        while waiting and len(running) < options.jobs:
            running.append(Running.start(waiting.pop(), options.seed, root / "subjects", root))
        for each in list(running):
            ended = each.process.poll(TIMEOUT)
            if ended is None:
                continue
            running.remove(each)
            good, verdict, reason = each.judge(ended)
            counts.setdefault(each.name.partition(":")[0], Counter())[verdict] += 1
            bad += not good
            if options.only is not None or not good:
                print(f"{each.name}  {' '.join(each.case.words)[:160]}\n    {reason[:300]}", flush=True)
            if options.keep is None:
                shutil.rmtree(each.folder, ignore_errors=True)
        time.sleep(0.01)
    for kind, verdicts in sorted(counts.items()):
        print(f"{kind:10} " + "  ".join(f"{verdict} {count}" for verdict, count in sorted(verdicts.items())))
    print(f"{len(names)} cases of seed {options.seed} in {time.monotonic() - started:.0f} s: {bad} bad")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
