"""Several processes as torchrun starts them, and words for a command line."""

from __future__ import annotations

import socket

PATIENCE = 300  # seconds after which a hang is a failure


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def options(**values: object) -> list[str]:
    return [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", str(value))]
