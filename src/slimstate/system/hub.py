"""The model hub, as far as its client is too talkative: whether it can be reached, and why it failed, in one line.

The client itself, offline, retries for half a minute and says so each time.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from urllib.parse import urlparse

from slimstate.system.errors import OutputError, quoted


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


def check_repository(name: str) -> None:
    """Refuse, before any work, a name that no repository can have, and a push that nobody is logged in for."""
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise OutputError(f"`push_to_hub` {quoted(name)} is no name of a repository: {reason(error)}") from error
    if not reachable():
        raise OutputError("`push_to_hub`: the hub cannot be reached from here")
    if get_token() is None:
        raise OutputError("`push_to_hub`: nobody is logged in here; run `hf auth login`, or set HF_TOKEN")
    try:
        HfApi().whoami()
    except Exception as error:  # of many kinds
        raise OutputError(f"`push_to_hub`: the hub does not take the login: {reason(error)}") from error


def push(folder: Path, name: str) -> str:
    """Upload a model's folder to a repository, made private where there is none of that name; returns its address."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        made = api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(
            repo_id=made.repo_id,
            folder_path=folder,
            commit_message="A model cut by slimstate",
            ignore_patterns=["runs/*"],
        )
    except Exception as error:  # of many kinds; what was made lies in its folder all the same
        raise OutputError(f"{folder} is written, and could not be pushed to {name}: {reason(error)}") from error
    return str(made)
