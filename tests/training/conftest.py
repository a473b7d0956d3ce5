"""Models with their cuts, and recoveries of every kind, made when a test needs them."""

from pathlib import Path

import pytest
import torch

import slimstate
import tiny
from recoveries import ALONE, DEFAULT, GATED, NAME, PAPER, PARTS, SHORT, TIED, Recover, confident, cut
from slimstate.models.stock import quiet_transformers

CHANGES = {
    "full": DEFAULT, **{name: {"full": True} for name in TIED}, "alone": ALONE,
    "controlled": {"control": True}, "twice": {"seed": 1}, "paper": PAPER,
}  # fmt: skip


@pytest.fixture(scope="session")
def pairs(tmp_path_factory) -> dict[str, tuple[Path, Path]]:
    """Models and their cuts, by variant; also `bfloat16` and `paper`."""
    root = tmp_path_factory.mktemp("pairs")
    quiet_transformers()

    class Pairs(dict[str, tuple[Path, Path]]):
        def __missing__(self, name: str) -> tuple[Path, Path]:
            if name == "paper":
                return self[GATED]
            model = confident(NAME).to(torch.bfloat16) if name == "bfloat16" else confident(name)
            folder = tiny.save(model, root / name, "100KB")
            self[name] = folder, cut(folder, root / f"{name}-cut")
            return self[name]

    return Pairs()


@pytest.fixture(scope="session")
def unseen_text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("unseen") / "unseen.txt"
    path.write_text(" = Unseen = \n" + tiny.text(1500, seed=9))  # WikiText, which has a word perplexity
    return path


@pytest.fixture(scope="session")
def recover(pairs, text_file) -> Recover:
    """Recover the cut model of a pair in a few steps, with the uncut one as its teacher; by default with adapters."""

    def run(name: str, out: Path, model: Path | None = None, **changes):
        options = {"teacher": pairs[name][0], "data": text_file, "progress": False, **SHORT, **changes}
        if not options.get("full") and not PARTS & (changes.keys() - {"full"}):
            options["lora"] = True
        return slimstate.recover(pairs[name][1] if model is None else model, out, **options)

    return run


@pytest.fixture(scope="session")
def recoveries(recover, pairs, tmp_path_factory) -> dict[str, Path]:
    """Recoveries by kind; also the `control` of one, and cuts of recoveries."""
    root = tmp_path_factory.mktemp("recoveries")

    class Recoveries(dict[str, Path]):
        def __missing__(self, kind: str) -> Path:
            if kind == "control":
                folder = self["controlled"].with_name("controlled-control")
            elif kind.startswith("cut "):
                folder = root / kind
                cut(*((self[NAME], folder, 6) if kind == "cut again" else (self["control"], folder)))
            else:
                folder, name = root / kind, NAME if kind in ("full", "alone", "controlled", "twice") else kind
                recover(name, folder, model=self[NAME] if kind == "twice" else None, **CHANGES.get(kind, {}))
            self[kind] = folder
            return folder

    return Recoveries()
