"""The model cards of cut, recovered and trained checkpoints; what is known of serving them is for the caller to add."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from slimstate.checkpoints.card_header import HUB_ID, public
from slimstate.core.file_names import PLAN
from slimstate.families import FAMILIES, loader_of
from slimstate.families.contract import Config
from slimstate.records.cut import CutRecord
from slimstate.records.plan import Plan
from slimstate.records.provenance import command_line, run_config
from slimstate.records.reconstruction import ReconstructionRecord
from slimstate.records.training import Measured, RecoveryRecord, TrainingRecord

MARKUP = re.compile(r"[\\`*\[\]<>]|(?<!\w)_|_(?!\w)")
HEADER = """---
library_name: transformers
pipeline_tag: text-generation
{base}tags:
- {model_type}
- linear-attention
- slimstate
---
"""

LOADING = """
## Load it

The stock class loads it, with no custom code:

```python
{code}
tokenizer = AutoTokenizer.from_pretrained({literal})
```

{on_a_cpu}
"""
ON_A_CPU = {
    "fla": "flash-linear-attention runs on a GPU; to run on a CPU, call `slimstate.prepare_fla()` before"
    " `from_pretrained`.",
    "transformers": "Where flash-linear-attention is installed transformers uses its kernels, which run on a GPU; to"
    ' run on a CPU, call `slimstate.prepare("{model_type}")` first.',
}

TEMPLATE = (
    HEADER
    + """
# {name}: key dim {key_dim} instead of {width}

Cut by slimstate from {source}: every head of every linear-attention layer keeps {key_dim} of its {width}
key/query {kept}. Nothing was retrained, and no other weight was changed.{correction}

| | before | after |
|---|---|---|
| key dim per head | {width} | {key_dim} |
| recurrent state per sequence (fp32) | {before} | {after} |
| parameters | {parameters_before:,} | {parameters_after:,} |
{speed}
Method: {method} (score {score}, seed {seed}). {calibration}What every head keeps, the options and the
fingerprint of the base model are in `slimstate_plan.json`; this repeats the cut:

{command}
{history}"""
    + LOADING
)

RECOVERED = (
    HEADER
    + """
# {name}: {title}

{source} fine-tuned by slimstate with {teaching}, on {tokens:,} tokens of {data}
({epochs:.2f} epochs; {parts}).
{history}
On {measured:,} tokens that were held out ({text}):

| | nats per token | perplexity per token | per word |
|---|---|---|---|
{rows}
{closed}
Settings, losses and fingerprints are in `slimstate_recovery.json`; this does it again:

{command}
"""
    + LOADING
)
TRAINED = (
    HEADER
    + """
# {name}

A {model_type} of {parameters:,} parameters, trained by slimstate from {source} on {tokens:,} tokens of {data}
({epochs:.2f} epochs).{sharing}

On {measured:,} tokens that were held out ({text}): {nats:.4f} nats per token,
perplexity {perplexity:.2f} per token and {per_word} per word.
Settings, losses and fingerprints are in `slimstate_training.json`; this does it again:

{command}
"""
    + LOADING
)
RECONSTRUCTED = """
## Reconstructed

Every cut layer was trained to give what the layer of {teacher} gives: {steps} steps of {batch} windows, of
{samples} x {length} tokens of {data}. The squared error behind each mixer, relative to what the mixer adds, on
{held_out} windows that were held out:

| layer | cut | reconstructed |
|---|---|---|
{rows}

{command}
"""

ROWS = {
    "before": "before the fine-tuning",
    "after": "**this model**",
    "uncut": "the uncut model",
    "control": "the uncut model with the same fine-tuning",
}
TEACHER = "the uncut model fine-tuned on the text alone, which taught"


def megabytes(count: int) -> str:
    return f"{count / 2**20:.2f} MiB"


def cut_card(plan: Plan, name: str, record: CutRecord, history: list[Mapping[str, Any]]) -> str:
    """The card of a cut; `history` are the cuts before this one."""
    source = plan.model.source
    calibration = ""
    if plan.calibration is not None:
        samples, length = plan.calibration.samples, plan.calibration.length
        calibration = f"Calibrated on {samples} windows of {length} tokens. " if samples and length else ""
    earlier = "".join(f"\n{line}" for entry in history for line in _done(entry, "before"))
    correction = f" The query scale that comes with the key dim: {prose(plan.correction)}."
    return _with_loading(plan.model_type, TEMPLATE).format(
        base=_base_line(source),
        **_titled(name),
        correction=correction if plan.correction else "",
        model_type=plan.model_type,
        source=code(public(source)),
        key_dim=plan.key_dim,
        kept="directions (the projections were turned by a rotation first)" if plan.rotates else "channels",
        width=plan.width,
        before=megabytes(record.state_bytes.before["fp32"]),
        after=megabytes(record.state_bytes.after["fp32"]),
        parameters_before=record.parameters.before,
        parameters_after=record.parameters.after,
        speed="" if record.speed is None else f"\nSpeed: {record.speed.speedup:.2f}x ({record.speed.source}).\n",
        method=code(plan.method),
        score=code(plan.score),
        seed=plan.seed,
        calibration=calibration,
        command=fenced(command_line(run_config("prune", {"model": public(source)}, {"apply": PLAN, "out": "DIR"}))),
        history=earlier + "\n" if earlier else "",
    )


def training_card(record: TrainingRecord, config: Config, name: str) -> str:
    """The card of a model that was trained from a config."""
    measured, shared = record.measured, record.shared_filters
    whose = {"head": "the channels of each head share", "all": "all channels of a layer share"}
    return _with_loading(config["model_type"], TRAINED).format(
        base="",
        **_titled(name),
        model_type=config["model_type"],
        parameters=record.parameters,
        source=code(public(record.model)),
        tokens=record.tokens,
        data=code(None if record.corpus is None else public(record.corpus.data)),
        epochs=record.epochs,
        sharing=f" In its convolutions {whose[shared]} one filter, stored for every channel." if shared else "",
        measured=measured.tokens,
        text=prose(_measured_on(record)),
        nats=measured.nats.after,
        perplexity=measured.perplexity["after"],
        per_word=_per_word(measured, "after"),
        command=fenced(_told(record.command)),
    )


def _per_word(measured: Measured, stage: str) -> str:
    """Perplexity per word, which records of 0.1 do not know."""
    value = measured.word_perplexity.get(stage)
    return "–" if value is None else f"{value:.{2 if value < 1e6 else 0}f}"


def recovery_card(record: RecoveryRecord, config: Config, name: str) -> str:
    """The card of a model that was fine-tuned after a cut, or as its control."""
    settings, measured, done = record.settings, record.measured, config["slimstate"]
    adaptation, teacher = settings.adaptation, record.teacher
    titles = {**ROWS, "control": TEACHER} if record.control_teaches else ROWS
    cut = "key_dim" in done
    teaching, parts = "cross entropy", "all weights"
    if teacher is not None:
        how = f"temperature {settings.temperature:g}, weight {settings.kd_weight:g}"
        teaching += f" and distillation from {code(public(teacher.model))} ({how})"
    if adaptation.mixers:
        parts = "the mixers whole"
    elif not adaptation.full:
        parts = f"LoRA of rank {settings.lora_rank} on {', '.join(adaptation.targets)}"
        parts += "; convolutions trained whole" if adaptation.convolutions else ""
        parts += f"; {settings.unfreeze.replace(',', ' and ')} unfrozen" if settings.unfreeze else ""
    past = [*done.get("history", ()), {**done, "recovered": done["recovered"][:-1]}]
    lines = [line for entry in past for line in _done(entry, "")]
    return _with_loading(config["model_type"], RECOVERED).format(
        base=_base_line(str(done.get("base_model", record.model))),
        model_type=config["model_type"],
        **_titled(name),
        title=f"key dim {done['key_dim']} instead of {done['width']}, recovered" if cut else "fine-tuned, not cut",
        source=code(public(record.model)),
        teaching=teaching,
        tokens=record.tokens,
        data=code(None if record.corpus is None else public(record.corpus.data)),
        epochs=record.epochs,
        parts=parts,
        history="".join(f"\n{line}\n" for line in lines),
        measured=measured.tokens,
        text=prose(_measured_on(record)),
        rows="\n".join(
            f"| {titles[key]} | {nats:.4f} | {measured.perplexity[key]:.2f} | {_per_word(measured, key)} |"
            for key, nats in measured.nats.known().items()
        ),
        closed="".join(
            f"\nIt closed {share:.0%} of the gap to {titles[goal]}.\n"
            for goal, share in measured.closed.items()
            if share is not None
        ),
        command=fenced(_told(record.command)),
    )


def reconstruction_section(record: ReconstructionRecord) -> str:
    """What the card of a model says of its reconstruction, behind all else."""
    settings, text = record.settings, record.calibration
    rows = "\n".join(
        f"| {layer.layer} | {layer.held_out_before:.4f} | {layer.held_out_after:.4f} |" for layer in record.layers
    )
    return RECONSTRUCTED.format(
        teacher=code(public(record.teacher.model)),
        steps=settings.steps,
        batch=settings.batch,
        samples=settings.samples,
        length=settings.length,
        data=code(public(text.data)),
        held_out=record.held_out,
        rows=rows,
        command=fenced(_told(record.command)),
    )


def _with_loading(model_type: str, template: str) -> str:
    """The template with what loading takes for models of this type; more braces are yet to be filled."""
    page = template.replace("{code}", loader_of(model_type).loading_code("{literal}", "AutoTokenizer"))
    return page.replace("{on_a_cpu}", ON_A_CPU[FAMILIES[model_type].library])


def _done(entry: Mapping[str, Any], when: str) -> Iterator[str]:
    """What an entry of a model's history says was done, in words."""
    after = f" {when}" if when else ""
    if "key_dim" in entry:
        yield f"Cut{after}: key dim {entry['width']} to {entry['key_dim']} by {code(entry['method'])}."
    for training in entry.get("trained", ()):
        yield f"Trained{after} on {training['tokens']:,} tokens."
    for recovery in entry.get("recovered", ()):
        yield f"Fine-tuned{after} on {recovery['tokens']:,} tokens."


def _base_line(source: str) -> str:
    """For models of the hub; a folder of this machine is none, though its name may look like one."""
    return f"base_model: {source}\n" if HUB_ID.fullmatch(source) and public(source) == source else ""


def _told(again: str | None) -> str:
    """A command with no places of this machine in it."""
    return shlex.join(word if word.startswith("-") else public(word) for word in shlex.split(again or ""))


def _measured_on(record: RecoveryRecord | TrainingRecord) -> str:
    """The text that was measured on, which may stand in a sentence."""
    text, data = record.measured.text or "", None if record.corpus is None else record.corpus.data
    return text.replace(data, public(data)) if data and data in text else public(text)


def _titled(name: str) -> dict[str, str]:
    """The name of a model as a heading has it, and as Python does."""
    return {"name": prose(name), "literal": json.dumps(name, ensure_ascii=not name.isprintable())}


def plain_line(value: object) -> str:
    """Anything as one line that shows all of its characters."""
    text = str(value)
    return text if text.isprintable() else "".join(x if x.isprintable() else ascii(x)[1:-1] for x in text)


def prose(value: object) -> str:
    """Anything as text of a Markdown page, with what Markdown and HTML would take for their own marked as text."""
    return MARKUP.sub(r"\\\g<0>", plain_line(value))


def code(value: object) -> str:
    """Anything as code in a line: in more backquotes than it has side by side itself."""
    text = plain_line(value)
    marks = "`" * (_longest_run(text) + 1)
    space = " " if text[:1] == "`" or text[-1:] == "`" else ""
    return f"{marks}{space}{text}{space}{marks}"


def fenced(value: object) -> str:
    """Anything as a block of code of one line."""
    text = plain_line(value)
    fence = "`" * max(3, _longest_run(text) + 1)
    return f"{fence}\n{text}\n{fence}"


def _longest_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)
