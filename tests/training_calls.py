"""The verbs that train, with the fields of their options by their own names: short calls for tests of many options."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import slimstate
from slimstate import PretrainOptions, RecoverOptions, RunOptions, TrainerOptions, TrainingText
from slimstate.records.training import RecoveryRecord, TrainingRecord
from slimstate.training.recover import Preview


class Listener(slimstate.Reporter):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


def values(given: dict[str, Any], **kinds: type) -> dict[str, Any]:
    """Options of these kinds, made of what is given; the rest of it as it is."""
    rest, made = dict(given), {}
    for name, kind in kinds.items():
        made[name] = kind(**{item.name: rest.pop(item.name) for item in fields(kind) if item.name in rest})
    return rest | made


def recover(model: Path, out: Path, **given: Any) -> RecoveryRecord:
    return slimstate.recover(
        model,
        out,
        **values(given, data=TrainingText, options=RecoverOptions, trainer=TrainerOptions, run=RunOptions),
    )


def preview(model: Path, **given: Any) -> Preview:
    return slimstate.preview(model, **values(given, options=RecoverOptions, run=RunOptions))


def train(config: Path, out: Path, **given: Any) -> TrainingRecord:
    return slimstate.train(
        config, out, **values(given, data=TrainingText, options=PretrainOptions, trainer=TrainerOptions, run=RunOptions)
    )
