"""The YAML header of a model card, which the hub reads, with the licence and language of the original model."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from slimstate.system.json_files import is_unicode

HEADER = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)
MAX_HEADER = 2**18  # characters
MAX_WORDS, MAX_WORD_LENGTH = 100, 200
INHERITED_FIELDS = ("license", "license_name", "license_link", "language", "tags", "base_model")
HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
DATASET = re.compile(rf"{HUB_ID.pattern}(:[\w.-]*){{0,2}}")


def public_name(source: object) -> str:
    """Return the name of a model or a text for a card: a hub id, or the last part of a path on this machine."""
    text = str(source)
    on_hub = DATASET.fullmatch(text) is not None and not Path(text.split(":", maxsplit=1)[0]).exists()
    return text if on_hub or "/" not in text else text.rstrip("/").rpartition("/")[2]


def public_path(source: object) -> str:
    """Return a path for a command on a card: a relative one as it was given, or else its public name."""
    text = str(source)
    is_below = not Path(text).is_absolute() and not {"~", ".."} & {part[:2].rstrip("/") for part in Path(text).parts}
    return text if is_below else public_name(text)


def with_original(card: str, folder: Path) -> str:
    """Return the card with the licence, language, tags and base model of the original in `folder`."""
    header = header_of(card)
    if header is None:
        return card
    original = header_of(_read_beginning(folder / "README.md")) or {}
    inherited = {name: value for name in INHERITED_FIELDS if (value := _valid(name, original.get(name))) is not None}
    tags = [*dict.fromkeys([*_as_list(inherited.pop("tags", [])), *_as_list(header.get("tags", []))])]
    base = {"base_model": inherited.pop("base_model")} if "base_model" in inherited.keys() - header.keys() else {}
    merged = {**inherited, **header, **base, "tags": tags}
    text = yaml.safe_dump(merged, sort_keys=False, allow_unicode=True, default_flow_style=False)
    return f"---\n{text}---\n" + card[HEADER.match(card).end() :]  # type: ignore[union-attr]


def header_of(card: str) -> Mapping[str, Any] | None:
    """Return the parsed header, or None if there is none that can be read."""
    match = HEADER.match(card.replace("\r\n", "\n"))
    if match is None:
        return None
    try:
        header = yaml.safe_load(match[1])
    except (yaml.YAMLError, RecursionError, ValueError):
        return None
    return header if isinstance(header, dict) else None


def _read_beginning(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(MAX_HEADER)
    except OSError:
        return ""


def _valid(name: str, value: object) -> object | None:
    """Return a word, or a list of words where the hub accepts one; None for anything else."""
    words = _as_list(value)
    if not words or len(words) > MAX_WORDS or not all(map(_is_word, words)):
        return None
    if name == "base_model" and not all(map(HUB_ID.fullmatch, words)):
        return None
    return value if name in ("language", "tags", "base_model") or isinstance(value, str) else None


def _is_word(word: object) -> bool:
    return isinstance(word, str) and 0 < len(word) <= MAX_WORD_LENGTH and word.isprintable() and is_unicode(word)


def _as_list(value: object) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]
