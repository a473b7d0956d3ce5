"""Compare calibration on another device or in another data type with the CPU in float32, for every family.

    python benchmarks/devices.py [--device cuda] [--names delta_net,mamba2] [--record FILE]

The models are tiny and have random weights. A number is the norm of the difference over that of the reference, the
largest of all layers. In bfloat16, gradients of models that choose experts or blocks are mostly rounding.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from harness import arguments  # noqa: E402

import tiny  # noqa: E402
from slimstate.benchmark.timing import device_name  # noqa: E402
from slimstate.checkpoints.reader import Checkpoint  # noqa: E402
from slimstate.core.evidence import Evidence, Need  # noqa: E402
from slimstate.models.devices import pick_device  # noqa: E402
from slimstate.models.load import load  # noqa: E402
from slimstate.pruning.calibration import calibrate  # noqa: E402
from slimstate.records.base import versions  # noqa: E402

FORWARD: frozenset[Need] = frozenset({"gram", "input"})
BACKWARD: frozenset[Need] = frozenset({"gradient"})  # apart, because other kernels run with gradients
DTYPES = ("float32", "bfloat16")


def evidence_of(folder: Path, device: str, dtype: str) -> dict[int, Evidence]:
    runtime, mixers = load(folder, device=device, dtype=dtype), Checkpoint.open(folder).mixers
    ids = tiny.token_ids().repeat(1, 4)[:, :128]
    forward, backward = (calibrate(runtime, mixers, ids, needs) for needs in (FORWARD, BACKWARD))
    return {layer: entry.extended(backward[layer]) for layer, entry in forward.items()}


def differences(evidence: dict[int, Evidence], reference: dict[int, Evidence]) -> dict[str, float]:
    worst: dict[str, float] = {}
    for layer, entry in reference.items():
        others = dict(evidence[layer].tensors())
        for name, expected in entry.tensors():
            error = (others[name].double() - expected.double()).norm() / expected.double().norm()
            worst[name] = max(worst.get(name, 0.0), float(error))
    return worst


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--device", default=None)
    parser.add_argument("--names", default=",".join(name.removesuffix("-plain") for name in tiny.EVERY_PLAIN))
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    names = ["delta_net", "mamba2"] if options.toy else options.names.split(",")
    device = pick_device(options.device)
    record: dict[str, Any] = {"device": device_name(device), "versions": versions(), "families": {}}
    with tempfile.TemporaryDirectory() as temporary:
        for name in names:
            folder = tiny.save(tiny.build(tiny.VARIANTS[f"{name}-plain"]), Path(temporary) / name)
            reference = evidence_of(folder, "cpu", "float32")
            by_dtype = {dtype: differences(evidence_of(folder, device.type, dtype), reference) for dtype in DTYPES}
            record["families"][name] = by_dtype
            print(name, json.dumps(by_dtype), flush=True)
    if options.record is not None:
        options.record.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
