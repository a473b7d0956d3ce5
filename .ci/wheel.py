"""Build wheel and sdist, install the wheel into an empty environment, and run the quickstart of README.md there.

The environment is empty but for slimstate itself; with `--borrow SITE` what it depends on is taken from another
environment's site-packages, which saves the minutes that installing torch takes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- quickstart -->", "<!-- end of quickstart -->"


def commands(page: str) -> list[str]:
    """The lines of the first block of commands between the marks."""
    block = page[page.index(BEGIN) : page.index(END)].split("```")[1]
    return [line.split("  #")[0].strip() for line in block.splitlines()[1:] if line.strip()]


def run(words: list[str], **settings: object) -> str:
    print("$", " ".join(map(str, words)), flush=True)
    started = time.perf_counter()
    done = subprocess.run(words, check=False, capture_output=True, text=True, **settings)
    print(done.stdout + done.stderr + f"({time.perf_counter() - started:.1f} s)", flush=True)
    if done.returncode:
        sys.exit(f"failed with exit code {done.returncode}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--borrow", type=Path, help="site-packages to take the dependencies from")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="where the built packages go")
    parser.add_argument("--extras", default="fla", help="extras to install, where nothing is borrowed")
    given = parser.parse_args()
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(given.dist), str(ROOT)])
    (wheel,) = sorted(given.dist.glob("*.whl"), key=lambda path: path.stat().st_mtime)[-1:]
    with tempfile.TemporaryDirectory(prefix="slimstate-wheel-") as place:
        env = Path(place) / "env"
        venv.create(env, with_pip=True)
        python = env / "bin" / "python"
        if given.borrow is None:
            constraints = ["--constraint", str(ROOT / "constraints.txt")]
            run([str(python), "-m", "pip", "install", "--quiet", *constraints, f"{wheel}[{given.extras}]"])
        else:
            run([str(python), "-m", "pip", "install", "--quiet", "--no-deps", str(wheel)])
            site = run([str(python), "-c", "import site; print(site.getsitepackages()[0])"]).strip()
            (Path(site) / "borrowed.pth").write_text(f"{given.borrow.resolve()}\n")
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment["PATH"] = f"{env / 'bin'}{os.pathsep}{environment['PATH']}"
        where = run([str(python), "-c", "import slimstate; print(slimstate.__file__)"], cwd=place, env=environment)
        if not where.strip().startswith(str(env)):
            sys.exit(f"not the wheel was imported, but {where}")
        for line in commands((ROOT / "README.md").read_text(encoding="utf-8")):
            run(["bash", "-c", line], cwd=place, env=environment)
        run(["bash", "-c", "slimstate run --list"], cwd=place, env=environment)
    print(f"{wheel.name}: built, installed, and the quickstart ran")


main()
