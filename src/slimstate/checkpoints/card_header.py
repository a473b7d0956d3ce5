"""The header of a model card, which the hub reads: what the original's says of licence and language stays.

It is YAML between two lines of dashes. Of a stranger's header only values of the kinds that the hub knows are taken.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from slimstate.system.json_files import is_unicode

HEADER = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)
MOST = 2**18  # characters of a card in which its header ends
MOST_WORDS, LONGEST_WORD = 100, 200
KEPT = ("license", "license_name", "license_link", "language", "tags", "base_model")
HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
DATASET = re.compile(rf"{HUB_ID.pattern}(:[\w.-]*){{0,2}}")


def public(source: object) -> str:
    """A model or a text as a card names it: what is on the hub as it is, of what lies on this machine its last part."""
    text = str(source)
    on_hub = DATASET.fullmatch(text) is not None and not Path(text.split(":", maxsplit=1)[0]).exists()
    return text if on_hub or "/" not in text else text.rstrip("/").rpartition("/")[2]


def with_original(card: str, folder: Path) -> str:
    """The card, with what the card of the original in `folder` says for the hub."""
    ours = header_of(card)
    if ours is None:
        return card
    original = header_of(_beginning(folder / "README.md")) or {}
    theirs = {name: value for name in KEPT if (value := _usable(name, original.get(name))) is not None}
    tags = [*dict.fromkeys([*_listed(theirs.pop("tags", [])), *_listed(ours.get("tags", []))])]
    base = {"base_model": theirs.pop("base_model")} if "base_model" in theirs and "base_model" not in ours else {}
    whole = {**theirs, **ours, **base, "tags": tags}
    written = yaml.safe_dump(whole, sort_keys=False, allow_unicode=True, default_flow_style=False)
    return f"---\n{written}---\n" + card[HEADER.match(card).end() :]  # type: ignore[union-attr]


def header_of(card: str) -> Mapping[str, Any] | None:
    """What stands between the dashes; None where nothing does that can be read."""
    found = HEADER.match(card.replace("\r\n", "\n"))
    if found is None:
        return None
    try:
        header = yaml.safe_load(found[1])
    except (yaml.YAMLError, RecursionError, ValueError):
        return None
    return header if isinstance(header, dict) else None


def _beginning(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(MOST)
    except OSError:
        return ""


def _usable(name: str, value: object) -> object | None:
    """A word, or a list of words where the hub takes one; base models are ids of the hub."""
    words = _listed(value)
    if not words or len(words) > MOST_WORDS or not all(map(_is_word, words)):
        return None
    if name == "base_model" and not all(map(HUB_ID.fullmatch, words)):
        return None
    return value if name in ("language", "tags", "base_model") or isinstance(value, str) else None


def _is_word(word: object) -> bool:
    return isinstance(word, str) and 0 < len(word) <= LONGEST_WORD and word.isprintable() and is_unicode(word)


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]
