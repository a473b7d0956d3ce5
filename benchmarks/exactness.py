"""Compare a cut model of every family with the uncut one with the same channels zeroed; writes a record.

python benchmarks/exactness.py && python docs/render.py
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from harness import arguments  # noqa: E402

import slimstate  # noqa: E402
import tiny  # noqa: E402
from slimstate.checkpoints.reader import Checkpoint  # noqa: E402
from slimstate.core.file_names import PLAN  # noqa: E402
from slimstate.models.hooks import masked  # noqa: E402
from slimstate.models.load import load  # noqa: E402
from slimstate.records.plan import Plan  # noqa: E402


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=tiny.token_ids(), use_cache=False).logits


def difference(original: Path, cut: Path) -> float:
    """Return the largest difference of any logit, in standard deviations of the logits."""
    checkpoint, model = Checkpoint.open(original), load(original, device="cpu").model
    plan = Plan.read(cut / PLAN)
    with masked(model, checkpoint.mixers, plan.selections, rescaled=not plan.corrected):
        expected = logits(model)
    return float((logits(load(cut, device="cpu").model) - expected).abs().max() / expected.std())


def main() -> None:
    toy = arguments(__doc__).parse_args().toy
    differences: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name in tiny.PLAIN if toy else tiny.EVERY_PLAIN:
            original = tiny.save(tiny.build(tiny.VARIANTS[name]), Path(temporary) / name)
            entry = differences.setdefault(tiny.VARIANTS[name].model_type, {})
            checkpoint = Checkpoint.open(original)
            value_dim, family = checkpoint.mixers[0].value_dim // 2, checkpoint.family
            cuts = {"half": {"key_dim": 12}, "third": {"key_dim": 8}, "rescaled": {"key_dim": 8, "keep_norm_eps": True}}
            if family.value_refusal(checkpoint.config) is None and not family.one_width:
                cuts |= {"values": {"value_dim": value_dim}, "both": {"key_dim": 12, "value_dim": value_dim}}
            if family.key_refusal(checkpoint.config) is not None:
                cuts = {"values": cuts["values"]}
            for kind, options in cuts.items():
                out = Path(temporary) / f"{name}-{kind}"
                slimstate.prune(original, out, method="random", progress=False, **options)
                entry[kind] = difference(original, out)
            print(name, entry, flush=True)
    if not toy:
        (ROOT / "docs" / "records" / "exactness.json").write_text(json.dumps(differences, indent=1) + "\n")


if __name__ == "__main__":
    main()
