"""The model cards of cut, recovered and trained checkpoints, from the templates in `cards/`."""

import functools
import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

from slimstate.checkpoints.card_header import HUB_ID, public_name, public_path
from slimstate.core.file_names import PLAN
from slimstate.families import FAMILIES, Config, loader_of
from slimstate.records.cut import CutRecord
from slimstate.records.evaluation import EvaluationRecord
from slimstate.records.numbers import epochs_text, format_mib, plural
from slimstate.records.plan import Plan
from slimstate.records.provenance import command_line, run_config
from slimstate.records.training import ReconstructionRecord, RecoveryRecord, TrainingRecord

TITLE = re.compile(r"^# .*?(?=: (?:key|value) dim |: fine-tuned|$)", re.M)
LOADED = re.compile(r'from_pretrained\("[^\n]*"\)')
MARKUP = re.compile(r"[\\`*\[\]<>]|(?<!\w)_|_(?!\w)")
STAGES = {
    "before": "before the fine-tuning",
    "after": "**this model**",
    "uncut": "the uncut model",
    "control": "the uncut model with the same fine-tuning",
}
UNTRAINED = "Nothing was retrained, and no other weight was changed."
CONTROL_TEACHES = "the uncut model fine-tuned on the text alone, which taught"


def cut_card(plan: Plan, name: str, record: CutRecord, history: list[Mapping[str, Any]]) -> str:
    """Return the card of a cut; `history` are the cuts before this one."""
    source = plan.model.source
    command = command_line(run_config("prune", {"model": public_path(source)}, {"apply": PLAN, "out": "DIR"}))
    model = _describe(name, plan.model_type, source)
    facts = {"plan": plan, "record": record, "history": history, "when": " before", "untrained": UNTRAINED}
    return render("cut.md", **model, **facts, command=command)


def training_card(record: TrainingRecord, config: Config, name: str) -> str:
    return render("trained.md", **_describe(name, config["model_type"]), **_describe_training(record))


def recovery_card(record: RecoveryRecord, config: Config, name: str) -> str:
    """Return the card of a model that was fine-tuned after a cut, or as its control."""
    entry = config["slimstate"]
    model = _describe(name, config["model_type"], str(entry.get("base_model", record.model)))
    history = [*entry.get("history", ()), {**entry, "recovered": entry["recovered"][:-1]}]
    titles = {**STAGES, "control": CONTROL_TEACHES} if record.control_teaches else STAGES
    facts = {**_describe_training(record), "config_entry": entry, "history": history, "titles": titles}
    return render("recovered.md", **model, **facts)


def with_reconstruction(card: str, record: ReconstructionRecord) -> str:
    """Return the card of a cut with a last section about its reconstruction, and no claim that nothing was trained."""
    section = render("reconstruction.md", record=record)
    return card.replace(UNTRAINED, "Then each cut layer was trained, as described under Reconstructed.") + section


def with_distillation(card: str, record: ReconstructionRecord, recovery: RecoveryRecord, command: str | None) -> str:
    """Return the card of a reconstruction, whose `command` becomes that of both, with a section on the distillation."""
    facts, titles = _describe_training(recovery), {**STAGES, "before": "before the distillation"}
    section = render("distillation.md", result=record.distillation, titles=titles, **facts)
    card = card.replace(fenced(_public_command(command)), fenced(_public_command(record.command)))
    return card if section in card else card + section


def renamed(card: str, name: str) -> str:
    """Return a card whose title and code name another folder."""
    card = TITLE.sub(lambda _: f"# {prose(name)}", card, count=1)
    return LOADED.sub(lambda _: f"from_pretrained({_literal(name)})", card)


def with_evaluation(card: str, record: EvaluationRecord) -> str:
    """Return a card with a last section about the measurement of the model and of the uncut one."""
    return card + render("evaluation.md", record=record)


def render(template: str, **values: object) -> str:
    """Return a template of `cards/` filled with values."""
    return _environment().get_template(template).render(values)


@functools.cache
def _environment() -> jinja2.Environment:
    cards = jinja2.FileSystemLoader(Path(__file__).parent / "cards")
    environment = jinja2.Environment(
        loader=cards, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {
        "code": code, "fenced": fenced, "prose": prose, "public": public_name, "public_command": _public_command,
        "perplexity": lambda value: "–" if value is None else f"{value:.{2 if value < 1e6 else 0}f}",
        "epochs": epochs_text, "plural": plural, "mebibytes": format_mib,
    }  # fmt: skip
    return environment


def _describe(name: str, model_type: str, source: str | None = None) -> dict[str, Any]:
    """Return what every card needs: the model's name, how it is loaded, and its base model if that is on the hub."""
    on_hub = source is not None and HUB_ID.fullmatch(source) and public_name(source) == source
    return {
        "name": name, "literal": _literal(name), "model_type": model_type, "base_model": source if on_hub else None,
        "loader": loader_of(model_type), "library": FAMILIES[model_type].library,
    }  # fmt: skip


def _literal(name: str) -> str:
    """Return a name as a string of Python, one that can be printed."""
    return json.dumps(name, ensure_ascii=not name.isprintable())


def _describe_training(record: TrainingRecord | RecoveryRecord) -> dict[str, Any]:
    data, text = None if record.corpus is None else record.corpus.data, record.measured.text or ""
    measured_on = text.replace(data, public_name(data)) if data and data in text else public_name(text)
    return {"record": record, "text": data, "measured_on": measured_on, "when": ""}


def _public_command(command: str | None) -> str:
    """Return a command without paths of this machine."""
    return shlex.join(word if word.startswith("-") else public_path(word) for word in shlex.split(command or ""))


def plain_line(value: object) -> str:
    """Return anything as one line, with characters that cannot be printed written as escapes."""
    text = str(value)
    return text if text.isprintable() else "".join(x if x.isprintable() else ascii(x)[1:-1] for x in text)


def prose(value: object) -> str:
    """Return anything as text of a Markdown page: what would be markup is escaped."""
    return MARKUP.sub(r"\\\g<0>", plain_line(value))


def code(value: object) -> str:
    """Return anything as inline code, in more backquotes than it has in a row itself."""
    text = plain_line(value)
    marks = "`" * (_longest_run(text) + 1)
    space = " " if text[:1] == "`" or text[-1:] == "`" else ""
    return f"{marks}{space}{text}{space}{marks}"


def fenced(value: object) -> str:
    """Return anything as a block of code with one line."""
    text = plain_line(value)
    fence = "`" * max(3, _longest_run(text) + 1)
    return f"{fence}\n{text}\n{fence}"


def _longest_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)
