"""Identify a model in records."""

from __future__ import annotations

from slimstate.checkpoints.reader import Checkpoint, cut_in, described_mixers
from slimstate.families.contract import Config
from slimstate.records.parts import Cut, Model
from slimstate.records.schema import ValidationError, from_json
from slimstate.system.errors import ModelError


def identity(checkpoint: Checkpoint, name: str, after: Config | None = None) -> Model:
    """Return the identity of a model by its config, or by its config `after` a change."""
    config = checkpoint.config if after is None else after
    entry, first = cut_in(config), described_mixers(config)[0]
    try:
        cut = None if entry is None else from_json(Cut, entry)
    except ValidationError as error:
        raise ModelError(f"{checkpoint.folder}/config.json describes the cut wrongly: {error}") from error
    return Model(
        name=name, model=checkpoint.source, fingerprint=checkpoint.fingerprint, model_type=checkpoint.family.model_type,
        key_dim=first.axis.width, value_dim=first.value_dim, cut=cut,
    )  # fmt: skip
