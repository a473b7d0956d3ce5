"""Divide the loss of a cut over the tokens of a text and over the layers.

    python benchmarks/loss_by_token.py --model MODEL --cut CUT --text TEXT [--length 1024 --max-tokens 200000]

A token is a repetition if the same two tokens stood earlier in its window, one after the other: to predict it well, a
model can recall what followed. It is familiar if it stood there after another token, and else new. For each kind: its
share of the tokens, the nats per token that the cut loses, and the share of the whole loss. The loss of a layer alone
is that of the uncut model with one layer of the cut.
"""

from __future__ import annotations

import json
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from harness import DEMO, arguments
from torch import Tensor

from slimstate import prune
from slimstate.benchmark.timing import device_name
from slimstate.checkpoints.reader import Checkpoint
from slimstate.evaluation.perplexity import evaluation_windows
from slimstate.models.load import Runtime, load

KINDS = ("repetition", "familiar", "new")
QUARTERS = 4  # of a window


def kinds_of(window: list[int]) -> list[int]:
    """Return the kind of every token but the first, as an index into KINDS."""
    kinds, seen, pairs = [], {window[0]}, set()
    for before, token in pairwise(window):
        kinds.append(0 if (before, token) in pairs else 1 if token in seen else 2)
        pairs.add((before, token))
        seen.add(token)
    return kinds


def nats(runtime: Runtime, windows: Tensor) -> Tensor:
    """Return the nats of every token but the first [windows, length - 1]."""
    rows = []
    for window in windows.split(1):
        ids = window.long().to(runtime.device)
        with torch.inference_mode():
            logits = runtime.model(input_ids=ids, use_cache=False).logits[0, :-1].float()
            rows.append(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none").cpu())
    return torch.stack(rows).double()


def layers_of(runtime: Runtime, checkpoint: Checkpoint) -> torch.nn.ModuleList:
    path = checkpoint.mixers[0].path.rsplit(f".{checkpoint.mixers[0].layer}.", 1)[0]
    layers = runtime.model.get_submodule(path)
    assert isinstance(layers, torch.nn.ModuleList)
    return layers


def divide(model: Path, cut: Path, text: str, length: int, max_tokens: int, device: str | None) -> dict[str, Any]:
    """Return the loss of the cut by kind of token, by quarter of the windows, and of each layer alone."""
    checkpoint, uncut, other = Checkpoint.open(model), load(model, device=device), load(cut, device=device)
    windows = evaluation_windows(uncut.tokenizer, text, length, max_tokens).tokens
    before = nats(uncut, windows)
    lost = nats(other, windows) - before
    kinds = torch.tensor([kinds_of(window) for window in windows.tolist()])
    by_kind = {
        name: {
            "tokens": float((kinds == number).double().mean()),
            "nats": float(lost[kinds == number].mean()),
            "share": float(lost[kinds == number].sum() / lost.sum()),
        }
        for number, name in enumerate(KINDS)
    }
    alone, places, cut_layers = {}, layers_of(uncut, checkpoint), layers_of(other, checkpoint)
    for mixer in checkpoint.mixers:
        layer, places[mixer.layer] = places[mixer.layer], cut_layers[mixer.layer]
        alone[mixer.layer] = float((nats(uncut, windows) - before).mean())
        places[mixer.layer] = layer
    quarters = [float(part.mean()) for part in lost.chunk(QUARTERS, dim=1)]
    return {"nats": float(lost.mean()), "by_kind": by_kind, "by_quarter": quarters, "layers_alone": alone}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", type=Path, default=DEMO / "model")
    parser.add_argument("--cut", type=Path, help="default: the bundled model at a quarter of its key dim, by l1")
    parser.add_argument("--text", default=str(DEMO / "evaluation.txt"))
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--max-tokens", type=int, default=200_000)
    parser.add_argument("--device")
    options = parser.parse_args()
    if options.toy:
        options.length, options.max_tokens = 64, 128
    with tempfile.TemporaryDirectory() as folder:
        cut = options.cut or Path(folder) / "cut"
        if options.cut is None:
            prune(options.model, cut, compression=0.75, method="l1", progress=False)
        divided = divide(options.model, cut, options.text, options.length, options.max_tokens, options.device)
    record = {"command": " ".join(["python", *sys.argv]), "device": device_name(torch.device(options.device or "cpu"))}
    print(json.dumps({**record, **divided}, indent=1))


if __name__ == "__main__":
    main()
