"""The model card of a cut checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slimstate.axes import Plan

TEMPLATE = """---
library_name: transformers
pipeline_tag: text-generation
{base}tags:
- {model_type}
- linear-attention
- slimstate
---

# {name}: key dim {key_dim} instead of {width}

Cut by slimstate from `{source}`: every head of every linear-attention layer keeps {key_dim} of its {width}
key/query channels. Nothing was retrained, and no other weight was changed.{correction}

| | before | after |
|---|---|---|
| key dim per head | {width} | {key_dim} |
| recurrent state per sequence (fp32) | {before} | {after} |
| parameters | {parameters_before:,} | {parameters_after:,} |

Method: `{method}` (score `{score}`, seed {seed}). {calibration}The kept channels of every head, the options and the
fingerprint of the base model are in `slimstate_plan.json`; this repeats the cut:

```
slimstate prune {source} --apply slimstate_plan.json --out DIR
```
{history}
## Load it

The stock class loads it, with no custom code:

```python
import fla  # registers the architecture
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
```

flash-linear-attention runs on a GPU; to run on a CPU, call `slimstate.prepare_fla()` before `from_pretrained`.
"""


def megabytes(count: int) -> str:
    return f"{count / 2**20:.2f} MiB"


def write_card(
    plan: Plan, name: str, states: tuple[int, int], parameters: tuple[int, int], history: list[Mapping[str, Any]]
) -> str:
    """The card; `states` and `parameters` are before and after, `history` the cuts before this one."""
    source = str(plan.model["source"])
    calibration = ""
    if plan.calibration is not None:
        about = plan.calibration
        calibration = f"Calibrated on {about['samples']} windows of {about['length']} tokens. "
    earlier = "".join(
        f"\nCut before: key dim {entry['width']} to {entry['key_dim']} by `{entry['method']}`." for entry in history
    )
    correction = (
        f" `norm_eps` in the config was multiplied by {plan.width}/{plan.key_dim}, which makes up for the query scale"
        " that comes with the key dim: the model computes what the uncut one does with the dropped channels zeroed."
    )
    hub_id = source.count("/") == 1 and not source.startswith((".", "/", "~"))
    return TEMPLATE.format(
        base=f"base_model: {source}\n" if hub_id else "",
        name=name,
        correction=correction if plan.corrected else "",
        model_type=plan.model_type,
        source=source,
        key_dim=plan.key_dim,
        width=plan.width,
        before=megabytes(states[0]),
        after=megabytes(states[1]),
        parameters_before=parameters[0],
        parameters_after=parameters[1],
        method=plan.method,
        score=plan.score,
        seed=plan.seed,
        calibration=calibration,
        history=earlier + "\n" if earlier else "",
    )
