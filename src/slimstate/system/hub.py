"""Push models to the hub, once it can be reached: offline, its client would retry for half a minute."""

import os
import socket
from pathlib import Path
from urllib.parse import urlparse

from slimstate.system.errors import OutputError, quoted, reason_of


def is_reachable() -> bool:
    """Return whether the hub's name can be resolved, here or by a proxy."""
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
    """Refuse, before any work, an invalid repository name and a push without a login."""
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise OutputError(f"`push_to_hub`: {quoted(name)} is not a repository name: {reason_of(error)}") from error
    if not is_reachable():
        raise OutputError("`push_to_hub`: the hub cannot be reached from here")
    if get_token() is None:
        raise OutputError("`push_to_hub`: you are not logged in; run `hf auth login`, or set HF_TOKEN")
    try:
        HfApi().whoami()
    except Exception as error:  # of many kinds
        raise OutputError(f"`push_to_hub`: the hub refuses the login: {reason_of(error)}") from error


def push(folder: Path, name: str) -> str:
    """Upload a model folder to a repository, which is created as a private one if needed; return its address."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        repo = api.create_repo(name, private=True, exist_ok=True)
        message = "A model cut by slimstate"
        api.upload_folder(repo_id=repo.repo_id, folder_path=folder, commit_message=message, ignore_patterns=["runs/*"])
    except Exception as error:  # of many kinds; the folder itself is complete
        raise OutputError(f"{folder} is written, but could not be pushed to {name}: {reason_of(error)}") from error
    return str(repo)
