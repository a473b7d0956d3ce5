"""Draw `docs/figures/channels.png`: the key channels of a head of the bundled model, those that a cut keeps and drops.

    python docs/channels.py              # draw the record
    python docs/channels.py --measure    # calibrate the bundled model and write the record first; half a minute

A channel carries the energy of its keys times that of its queries over the calibration text, as a share of its head.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
from matplotlib import pyplot as plt
from tables.layout import DOCS, RECORDS, record

DEMO = DOCS.parent / "demo"
VALUE_DIM = 64
KEPT, DROPPED = "#3b6fd4", "#c9ced6"


def measure() -> None:
    """Cut the bundled model to half of its key channels and write the shares of all heads."""
    import slimstate
    from slimstate.core.evidence import EvidenceFile

    with tempfile.TemporaryDirectory() as folder:
        path, options = Path(folder) / "evidence", {"samples": 32, "length": 512, "key_dim": 64}
        cut = slimstate.prune(DEMO / "model", data=DEMO / "calibration.txt", evidence=path, **options)
        heads = []
        for layer, evidence in EvidenceFile.open(path).evidence.items():
            energies = [gram.diagonal(dim1=-2, dim2=-1) for gram in (evidence.query_gram, evidence.key_gram)]
            shares = energies[0] * energies[1]
            for head, keep in enumerate(cut.plan.selections[layer].keep.tolist()):
                share = [round(value, 6) for value in (shares[head] / shares[head].sum()).tolist()]
                heads.append({"layer": layer, "head": head, "keep": keep, "shares": share})
    about = {"command": "python docs/channels.py --measure", "model": "demo/model", "method": "drrqr", **options}
    (RECORDS / "channels.json").write_text(json.dumps({**about, "heads": heads}) + "\n", encoding="utf-8")


def draw() -> None:
    """Draw the head whose kept channels carry the median share of all heads."""
    heads = sorted(record("channels")["heads"], key=lambda head: sum(head["shares"][c] for c in head["keep"]))
    head = heads[len(heads) // 2 - 1]
    shares = 100 * np.array(head["shares"])
    order = np.argsort(-shares)
    shares, keep = shares[order], np.flatnonzero(np.isin(order, head["keep"]))
    figure, axes = plt.subplots(
        2, 2, figsize=(8.4, 3.9), sharex="col", width_ratios=[len(shares), len(keep)], height_ratios=[2, 1.5]
    )
    colours = np.full(len(shares), DROPPED)
    colours[keep] = KEPT
    for column, (values, tints) in enumerate(((shares, colours), (shares[keep], colours[keep]))):
        bars, state = axes[:, column]
        bars.bar(range(len(values)), values, color=tints, width=0.8)
        bars.set(yscale="log", ylim=(shares.min() / 2, 100), xlim=(-0.7, len(values) - 0.3), xticks=[])
        bars.yaxis.set_major_formatter("{x:g}")
        state.bar(range(len(values)), VALUE_DIM, color=tints, width=0.8)
        state.set(ylim=(0, VALUE_DIM), yticks=[], xlabel=f"{len(values)} key channels, sorted")
        for side in ("top", "right"):
            bars.spines[side].set_visible(False)
    axes[0, 0].set(ylabel="carries, % of the head", title="one head of a trained DeltaNet")
    axes[0, 1].tick_params(axis="y", which="both", left=False, labelleft=False)
    axes[0, 1].set_title("after the cut")
    axes[0, 1].spines["left"].set_visible(False)
    axes[1, 0].set_ylabel(f"its state:\n{VALUE_DIM} x {len(shares)}")
    axes[1, 1].set_ylabel(f"{VALUE_DIM} x {len(keep)}")
    carried = shares[keep].sum()
    for row, text, colour in ((0.86, f"kept: 64 channels carry {carried:.0f} %", KEPT),
                              (0.72, f"dropped: 64 channels carry {100 - carried:.0f} %", "#6b7280")):  # fmt: skip
        axes[0, 0].text(0.99, row, text, color=colour, ha="right", transform=axes[0, 0].transAxes)
    figure.tight_layout()
    figure.savefig(DOCS / "figures" / "channels.png", dpi=100, metadata={"Software": None})


if __name__ == "__main__":
    if "--measure" in sys.argv[1:]:
        measure()
    draw()
