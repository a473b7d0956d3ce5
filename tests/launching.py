"""Programs in processes of their own, alone and as torchrun starts several, and words for a command line."""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from places import TESTS

PATIENCE = 300  # seconds after which a hang is a failure
ALONE = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def options(**values: object) -> list[str]:
    return [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", str(value))]


@functools.cache
def _warm() -> subprocess.Popen:
    """The one process of this test run that every program is forked from (`warm_python.py`)."""
    process = subprocess.Popen(
        [sys.executable, TESTS / "warm_python.py"],
        env=os.environ | ALONE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
    )  # fmt: skip
    atexit.register(process.kill)
    return process


def _ask(**wanted: object) -> int | None:
    warm = _warm()
    print(json.dumps(wanted), file=warm.stdin, flush=True)
    return json.loads(warm.stdout.readline())


class Program:
    """`python WORDS` in a process of its own, which had torch, transformers and fla loaded when it began."""

    def __init__(self, *words: object, out: Path | str = os.devnull, err: Path | str = os.devnull, **environment: str):
        given = {"environment": os.environ | ALONE | environment, "out": str(out), "err": str(err)}
        self.pid = _ask(words=[str(word) for word in words], **given)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = _ask(wait=self.pid)
        return self.returncode

    def wait(self, timeout: float = PATIENCE) -> int:
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise TimeoutError(f"a program still runs after {timeout} s")
            time.sleep(0.02)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.wait()


def stock_logits(ids: Path, folders: Iterable[Path], kind: str = "") -> None:
    """Have the stock class load the folders in a process without slimstate, and leave its logits in each.

    Where it matters whether fla is there (`reload_stock.py` has the kinds), that is a Python which has loaded nothing.
    """
    words = [TESTS / "reload_stock.py", *([kind] if kind else []), ids, *folders]
    if kind.endswith("-fla"):
        subprocess.run([sys.executable, *words], env=os.environ | ALONE, check=True, capture_output=True)
        return
    said = ids.with_suffix(".err")
    assert Program(*words, err=said).wait() == 0, said.read_text()


def launch(count: int, folder: Path, *words: object) -> list[tuple[int, str, str]]:
    """Processes as torchrun would start them, but none is ended because another failed: codes, outputs, errors."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(count)}
    places = [(folder / f"rank{rank}.out", folder / f"rank{rank}.err") for rank in range(count)]
    started = [
        Program(*words, out=out, err=err, RANK=str(rank), LOCAL_RANK=str(rank), **meeting)
        for rank, (out, err) in enumerate(places)
    ]
    try:
        codes = [process.wait() for process in started]
    finally:
        for process in started:
            process.kill()
    return [(code, out.read_text(), err.read_text()) for code, (out, err) in zip(codes, places, strict=True)]
