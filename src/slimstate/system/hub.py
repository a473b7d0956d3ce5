"""The model hub, as far as its client is too talkative: whether it can be reached, and why it failed, in one line.

The client itself, offline, retries for half a minute and says so each time.
"""

from __future__ import annotations

import os
import socket
from urllib.parse import urlparse


def reason(error: Exception) -> str:
    """The first line of what the client says; it raises many kinds: offline, missing, private, out of disk."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def reachable() -> bool:
    """True where the hub's name resolves, or where a proxy would resolve it."""
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return False
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True
    endpoint = urlparse(constants.ENDPOINT)
    try:
        socket.getaddrinfo(endpoint.hostname, endpoint.port or 443)
    except OSError:
        return False
    return True
