"""Pythons that have torch and transformers loaded, one of them fla too: they fork for each program they are to run.

To load all three takes ten seconds. The arguments are two sockets: for programs that are to find fla loaded, and for
those that are not. A Python reads a JSON object a line: `words` and more of a program to run, answered by its process
id, or the `wait` for one, answered by its exit code or null. A program begins where `python WORDS` would begin, but for
those libraries; nothing of slimstate is loaded.
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import sys
import warnings
from pathlib import Path

warnings.simplefilter("ignore")

import torch  # noqa: E402, F401
import transformers  # noqa: E402, F401


def serve(place: socket.socket) -> list[str]:
    """Comes back in the forks alone, with the words of the program."""
    with place, place.makefile("rw") as stream:
        for line in stream:
            asked = json.loads(line)
            if "words" in asked:
                answer: int | None = os.fork()
                if answer == 0:
                    become(**asked)
                    return asked["words"]
            else:
                ended, status = os.waitpid(asked["wait"], os.WNOHANG)
                answer = os.waitstatus_to_exitcode(status) if ended else None
            print(json.dumps(answer), file=stream, flush=True)
    os._exit(0)


def become(words: list[str], environment: dict[str, str], out: str, err: str) -> None:
    """Take the environment and the streams of the program."""
    os.environ.clear()
    os.environ.update(environment)
    for place, stream, flags in (
        (os.devnull, 0, os.O_RDONLY),
        (out, 1, os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        (err, 2, os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
    ):
        opened = os.open(place, flags, 0o600)
        os.dup2(opened, stream)
        os.close(opened)
    warnings.resetwarnings()


def run(words: list[str]) -> None:
    """`python WORDS`, of a file or with -m."""
    if words[0] == "-m":
        sys.argv = ["-m", *words[2:]]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = list(words), str(Path(words[0]).parent)
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    with_fla, without_fla = (socket.socket(fileno=int(number)) for number in sys.argv[1:])
    mine, other = (with_fla, without_fla) if os.fork() else (without_fla, with_fla)
    other.close()
    if mine is with_fla and mine.recv(1, socket.MSG_PEEK):  # once there is a program
        import fla  # noqa: F401
    assert "slimstate" not in sys.modules
    assert mine is with_fla or "fla" not in sys.modules
    run(serve(mine))
