"""Whether the model hub can be reached, asked before its client is: that one retries for half a minute and says so."""

from __future__ import annotations

import os
import socket
from urllib.parse import urlparse


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
