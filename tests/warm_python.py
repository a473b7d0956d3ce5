"""Pythons with torch and transformers loaded, one of them with fla too, that fork for each program to run.

Loading all three takes ten seconds, so all processes of a test run share them, and they load when a program comes. The
arguments are two listening sockets, for programs with fla and for those without, and a pipe that ends with the run.
Each line of a connection is a JSON object: either a program to run, with its `words` and streams, answered by its
process id, or `wait` with a process id, answered by its exit code or null. A program starts as `python WORDS` does, but
with those libraries loaded; nothing of slimstate is. It ends as Python does, except that the memory is left to the
system: to free what the libraries hold takes two seconds.
"""

import atexit
import gc
import json
import os
import runpy
import select
import socket
import sys
import threading
import warnings
from pathlib import Path
from typing import TextIO

warnings.simplefilter("ignore")


def wait(*places: socket.socket) -> list[socket.socket]:
    """Return those of the sockets that have something to read; end with the run."""
    ready = select.select([RUN, *places], [], [])[0]
    return os._exit(0) if RUN in ready else ready


def serve(listener: socket.socket) -> list[str]:
    """Answer requests; return only in a fork, with the words of its program."""
    gc.collect()
    gc.freeze()  # otherwise the garbage collections of each fork would copy what the libraries hold
    streams: dict[socket.socket, TextIO] = {}
    while True:
        for place in wait(listener, *streams):
            if place is listener:
                client, _ = listener.accept()
                streams[client] = client.makefile("rw")
            elif line := streams[place].readline():
                request = json.loads(line)
                if "words" in request:
                    answer: int | None = os.fork()
                    if answer == 0:
                        for inherited in (listener, *streams, *streams.values()):
                            inherited.close()
                        become(**request)
                        return request["words"]
                else:
                    ended, status = os.waitpid(request["wait"], os.WNOHANG)
                    answer = os.waitstatus_to_exitcode(status) if ended else None
                print(json.dumps(answer), file=streams[place], flush=True)
            else:
                streams.pop(place).close()


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


def end(code: object) -> None:
    """End the process with what `sys.exit` was given."""
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


if __name__ == "__main__":
    with_fla, without_fla = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    RUN = int(sys.argv[3])
    wait(with_fla, without_fla)
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedModel  # noqa: F401 - transformers itself loads nothing

    torch.backends.mkldnn.set_flags(False)  # as in the tests, which compare bytes with those of programs
    mine, other = (with_fla, without_fla) if os.fork() else (without_fla, with_fla)
    other.close()
    wait(mine)
    if mine is with_fla:
        import fla  # noqa: F401
    assert "slimstate" not in sys.modules
    assert mine is with_fla or "fla" not in sys.modules
    code: object = 0
    try:
        run(serve(mine))
    except SystemExit as stop:
        code = stop.code
    except Exception:
        sys.excepthook(*sys.exc_info())
        code = 1
    end(code)
