"""Commands on damaged input, thousands of them, each judged: `python tests/fuzz/run.py --cases 4000 --seed 7`.

Everything is drawn from the seed. A case is named CLASS:NUMBER, and `--only CLASS:NUMBER` runs that one again and shows
what it said. Each command runs in a fork of this process, which has imported all that takes seconds and runs nothing.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

os.environ.update(
    {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
)
sys.path[:0] = [str(Path(__file__).parents[1])]

import torch  # noqa: E402

from fuzz.classes import CLASSES, Case  # noqa: E402
from fuzz.subjects import build  # noqa: E402
from fuzz.verdicts import SECONDS, Ended, complaint, inventory, misfit, touched  # noqa: E402
from slimstate import cli  # noqa: E402
from slimstate.models.prepare import prepare_fla  # noqa: E402

PATIENCE = 4 * SECONDS  # of wall; other work may share the machine
MEMORY = 24 * 2**30  # of addresses


@dataclass(frozen=True, kw_only=True)
class Running:
    name: str
    case: Case
    folder: Path
    before: dict[str, str]
    process: int
    began: float


def forked(work: Callable[[], object], errors: Path) -> int:
    """The process that does the work, with its standard error in a file; it ends as `sys.exit` would end it."""
    child = os.fork()
    if child:
        return child
    code: object = 99
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        said = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream, target in ((1, os.open(os.devnull, os.O_WRONLY)), (2, said)):
            os.dup2(target, stream)
        sys.stdin.close()
        try:
            code = work() or 0
        except SystemExit as stop:
            code = stop.code or 0
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def waited(process: int, began: float, patience: float) -> tuple[int, float, bool] | None:
    """Exit code, seconds of processor and whether it had to be ended; None where it still runs."""
    found, status, used = os.wait4(process, os.WNOHANG)
    late = not found and time.monotonic() - began > patience
    if late:
        os.killpg(process, signal.SIGKILL)
        found, status, used = os.wait4(process, 0)
    return (os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, late) if found else None


def begin(name: str, seed: int, seeds: Path, root: Path) -> Running:
    """Make a case's folder and start its command in it."""
    kind = name.partition(":")[0]
    folder = root / name.replace(":", "-")
    for inner in ("work", "outside", "tmp", "text"):
        (folder / inner).mkdir(parents=True)
    (folder / "outside" / "secret.txt").write_text("nobody's business\n")
    (folder / "outside" / "other.safetensors").write_bytes(b"precious")
    shutil.copytree(seeds / "text", folder / "text", dirs_exist_ok=True)
    if kind == "text":
        shutil.rmtree(folder / "text")
    case = CLASSES[kind](Random(f"{seed}:{name}"), seeds, folder)

    def command() -> None:
        os.chdir(folder)
        os.environ.update(TMPDIR=str(folder / "tmp"), HOME=str(root), XDG_CACHE_HOME=str(root / "cache"))
        tempfile.tempdir = None
        sys.argv = ["slimstate", *case.words]
        cli.main()

    before = inventory(folder)
    return Running(
        name=name, case=case, folder=folder, before=before, began=time.monotonic(),
        process=forked(command, root / f"{folder.name}.stderr"),
    )  # fmt: skip


def judged(running: Running, code: int, processor: float, late: bool) -> tuple[str, str]:
    """The verdict in a word, and what it rests on."""
    said = running.folder.with_suffix(".stderr")
    errors = said.read_text(errors="replace")
    ended = Ended(code=code, wall=time.monotonic() - running.began, processor=processor, errors=errors, timed_out=late)
    wrong = complaint(ended) or touched(running.before, inventory(running.folder), running.case.outputs(code == 0))
    out = running.folder / (running.case.out or "")
    if wrong is None and code == 0 and running.case.model is not None and (out / "config.json").exists():
        wrong = _differs(running.folder / running.case.model, out)
    last = errors.splitlines()[-1] if errors.strip() else ""
    return (f"exit {code}", last) if wrong is None else (wrong.split(":")[0], wrong)


def _differs(source: Path, out: Path) -> str | None:
    """Whether a written model is its masked source, found out in a process of its own."""
    said = out.parent / "difference"

    def compare() -> None:
        tempfile.tempdir = str(out.parent)
        found = misfit(source, out)
        print(found or "", file=sys.stderr)

    process, began = forked(compare, said), time.monotonic()
    while (ended := waited(process, began, PATIENCE)) is None:
        time.sleep(0.02)
    lines = said.read_text(errors="replace").strip().splitlines()
    return (lines[-1] if lines else None) if ended[0] == 0 else f"the written model does not load: {lines[-1]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--classes", default=",".join(CLASSES))
    parser.add_argument("--only", help="CLASS:NUMBER, and more of them with commas")
    parser.add_argument("--keep", type=Path, help="a folder that keeps what the cases were made of")
    given = parser.parse_args()
    chosen = given.classes.split(",")
    names = [f"{chosen[i % len(chosen)]}:{i // len(chosen)}" for i in range(given.cases)]
    names = names if given.only is None else given.only.split(",")
    torch.set_num_threads(1)
    prepare_fla()
    with tempfile.TemporaryDirectory(prefix="slimstate-fuzz-") as scratch:
        root = given.keep or Path(scratch)
        root.mkdir(exist_ok=True)
        seeds = root / "subjects"
        process = forked(lambda: build(seeds), root / "subjects.stderr")
        if os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]):
            print((root / "subjects.stderr").read_text())
            return 1
        return report(names, given.seed, seeds, root, given.jobs, given.only is not None, given.keep is not None)


def report(names: list[str], seed: int, seeds: Path, root: Path, jobs: int, loud: bool, keep: bool) -> int:
    """Run the cases, print those that end badly, and count the verdicts by class."""
    began, waiting, running = time.monotonic(), names[::-1], []
    counts: dict[str, Counter[str]] = {}
    bad = 0
    while waiting or running:
        while waiting and len(running) < jobs:
            running.append(begin(waiting.pop(), seed, seeds, root))
        for one in list(running):
            ended = waited(one.process, one.began, PATIENCE)
            if ended is None:
                continue
            running.remove(one)
            verdict, why = judged(one, *ended)
            counts.setdefault(one.name.partition(":")[0], Counter())[verdict] += 1
            good = verdict.startswith("exit ") and verdict[5:].isdigit()
            bad += not good
            if loud or not good:
                print(f"{one.name}  {' '.join(one.case.words)[:160]}\n    {why[:300]}", flush=True)
            if not keep:
                shutil.rmtree(one.folder, ignore_errors=True)
        time.sleep(0.01)
    for kind, found in sorted(counts.items()):
        print(f"{kind:10} " + "  ".join(f"{verdict} {count}" for verdict, count in sorted(found.items())))
    print(f"{len(names)} cases of seed {seed} in {time.monotonic() - began:.0f} s: {bad} bad")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
