"""Start programs in processes of their own, alone or several as torchrun does, and build command lines."""

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
from tempfile import TemporaryDirectory
from typing import TextIO

from places import TESTS

PATIENCE = 300  # seconds after which a hang is a failure
WARM, WARM_FOLDER = {True: "with-fla", False: "without-fla"}, "SLIMSTATE_WARM_PYTHONS"
RUNNING: list[tuple[object, ...]] = []  # warm Pythons, which end with this process
ALONE = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def options(**values: object) -> list[str]:
    """Return options as flags; None and False are left out."""
    words: list[str] = []
    for name, value in values.items():
        if value is not None and value is not False:
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return words


def start_warm() -> None:
    """Start the Pythons that programs are forked from (`warm_python.py`), for this process and those it starts."""
    folder, (watched, held) = TemporaryDirectory(), os.pipe()
    listeners = [socket.socket(socket.AF_UNIX) for _ in WARM]
    for name, listener in zip(WARM.values(), listeners, strict=True):
        listener.bind(f"{folder.name}/{name}")
        listener.listen()
    numbers = [*(listener.fileno() for listener in listeners), watched]
    command = [sys.executable, TESTS / "warm_python.py", *map(str, numbers)]
    RUNNING.append((subprocess.Popen(command, env=os.environ | ALONE, pass_fds=numbers), held, folder))
    os.environ[WARM_FOLDER] = folder.name
    os.close(watched)
    for listener in listeners:
        listener.close()


@functools.cache
def _warm(fla: bool) -> TextIO:
    if WARM_FOLDER not in os.environ:
        start_warm()
    place = socket.socket(socket.AF_UNIX)
    place.connect(f"{os.environ[WARM_FOLDER]}/{WARM[fla]}")
    return place.makefile("rw")


def _request(fla: bool, **request: object) -> int | None:
    stream = _warm(fla)
    print(json.dumps(request), file=stream, flush=True)
    return json.loads(stream.readline())


class Program:
    """`python WORDS` in a process of its own, in which torch, transformers and perhaps fla are loaded already."""

    def __init__(
        self,
        *words: object,
        out: Path | str = os.devnull,
        err: Path | str = os.devnull,
        fla: bool = True,
        **environment: str,
    ):
        settings = {"environment": os.environ | ALONE | environment, "out": str(out), "err": str(err)}
        self.fla = fla
        self.pid = _request(fla, words=[str(word) for word in words], **settings)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = _request(self.fla, wait=self.pid)
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
    """Load the folders with the stock class in a process without slimstate, and write the logits to each.

    `kind` says whether fla must be absent (see `reload_stock.py`): it registers classes of its own in place of those of
    transformers.
    """
    words, errors = [TESTS / "reload_stock.py", *([kind] if kind else []), ids, *folders], ids.with_suffix(".err")
    assert Program(*words, err=errors, fla=not kind.endswith("-fla")).wait() == 0, errors.read_text()


def start_ranks(count: int, folder: Path, *words: object) -> list[Program]:
    """Start processes as torchrun does, except that none is ended because another failed."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(count)}
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    streams = [{kind: folder / f"rank{rank}.{kind}" for kind in ("out", "err")} for rank in range(count)]
    return [Program(*words, **files, **rank, **meeting) for files, rank in zip(streams, ranks, strict=True)]


def wait_for_all(programs: Iterable[Program | subprocess.Popen]) -> list[int]:
    """Return the exit codes; where one takes too long, all are killed."""
    programs = list(programs)
    try:
        return [program.wait(PATIENCE) for program in programs]
    finally:
        for program in programs:
            program.kill()


def launch(count: int, folder: Path, *words: object) -> list[tuple[int, str, str]]:
    """Return the exit codes, outputs and errors of processes as torchrun starts them."""
    codes = wait_for_all(start_ranks(count, folder, *words))
    texts = [[(folder / f"rank{rank}.{kind}").read_text() for kind in ("out", "err")] for rank in range(count)]
    return [(code, out, err) for code, (out, err) in zip(codes, texts, strict=True)]
