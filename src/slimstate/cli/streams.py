"""Standard input, output and error: there, able to say any name, and complained of when they are full."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from slimstate.system.errors import OutputError, PlanError

STREAMS = ("stdin", "stdout", "stderr")


class Output(io.TextIOWrapper):
    """Standard output, whose failures are told as those of any other output."""

    def write(self, text: str) -> int:
        with self._in_words():
            return super().write(text)
        return len(text)

    def flush(self) -> None:
        with self._in_words():
            super().flush()

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # what is left in the buffer is tried again when the process ends, and may then go nowhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            if not isinstance(error, BrokenPipeError):  # whoever read it has seen enough
                raise OutputError(f"cannot write to standard output: {error.strerror}") from error


def secure() -> None:
    """A stream that is closed leads nowhere: else the next file that is opened would take its number.

    What a stream cannot say, as a file name that is no UTF-8, it says with backslashes.
    """
    for number, name in enumerate(STREAMS):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r+", encoding="utf-8"))  # noqa: SIM115 - to the end of the process
    stream = sys.stdout
    if stream is sys.__stdout__ and type(stream) is io.TextIOWrapper:  # in tests it may be another one
        settings = {"encoding": stream.encoding, "line_buffering": stream.line_buffering}
        settings["write_through"] = stream.write_through
        sys.stdout = sys.__stdout__ = Output(stream.detach(), errors="backslashreplace", **settings)  # type: ignore
    with suppress(AttributeError):
        sys.stderr.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def readable(words: Sequence[str]) -> None:
    """Refuse words that are no text: names of files that are not UTF-8 cannot be told to every library."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError as error:
            shown = word.encode("ascii", "backslashreplace").decode()
            raise PlanError(f"{shown} is not UTF-8: rename it") from error
