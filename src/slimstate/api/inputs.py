"""What people hand to a verb: models in folders, on the hub or in memory.

A model in memory is written to a temporary folder with `save_pretrained`, and from there on it is as any other: so the
same code reads it, and its fingerprint is that of the bytes that were written. The folder goes when the verb is done.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

import torch

from slimstate.api.progress import Progress, reporter_of
from slimstate.system.errors import ModelError, PlanError, quoted, reason_of
from slimstate.system.progress import Reporter

Model: TypeAlias = str | PathLike[str] | torch.nn.Module


@dataclass(frozen=True, kw_only=True)
class StoredModel(PathLike[str]):
    """A model in memory that was written to a folder: opened by its folder, told by its name."""

    folder: Path
    name: str

    def __fspath__(self) -> str:
        return str(self.folder)

    def __str__(self) -> str:
        return self.name


@dataclass(kw_only=True)
class Inputs:
    """The models of one call; what was written for them goes at its end."""

    tokenizer: Any
    reporter: Reporter
    _stack: ExitStack = field(default_factory=ExitStack)

    @classmethod
    def of(cls, tokenizer: Any, progress: Progress, *models: Model | None) -> Inputs:
        """A tokenizer belongs to a model in memory: a folder has its own."""
        if tokenizer is not None and not any(isinstance(model, torch.nn.Module) for model in models):
            raise PlanError("a model in a folder has its own tokenizer: leave out `tokenizer`")
        if tokenizer is not None and not hasattr(tokenizer, "save_pretrained"):
            kind = quoted(type(tokenizer).__name__)
            raise PlanError(f"`tokenizer` is a {kind}; it must be a tokenizer of transformers")
        return cls(tokenizer=tokenizer, reporter=reporter_of(progress))

    def __enter__(self) -> Inputs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def folder(self) -> Path:
        """A new folder that lasts as long as the call."""
        return Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="slimstate-")))

    def model(self, given: Model, *, reads_text: bool = True) -> str | PathLike[str]:
        """A model as the verbs take it: where it lies."""
        if not isinstance(given, torch.nn.Module):
            if not isinstance(given, (str, os.PathLike)):
                kind = quoted(type(given).__name__)
                raise ModelError(f"{kind} is no model: give a folder, a hub id, or a model of transformers")
            return given
        if not hasattr(given, "save_pretrained") or not hasattr(given, "config"):
            raise ModelError(f"{type(given).__name__} has no save_pretrained: only models of transformers can be taken")
        if reads_text and self.tokenizer is None:
            raise PlanError("give the `tokenizer` of the model in memory too: it reads the text")
        folder = self.folder() / "model"
        with self.reporter.waiting("writing the model in memory to a temporary folder"):
            try:
                saved: Any = given
                saved.save_pretrained(folder)
                if self.tokenizer is not None:
                    self.tokenizer.save_pretrained(folder)
            except Exception as error:  # of many kinds: shared tensors, a full disk, no names
                raise ModelError(f"save_pretrained of {type(given).__name__} fails: {reason_of(error)}") from error
        return StoredModel(folder=folder, name=name_of(given))


def name_of(model: Any) -> str:
    """What records call a model in memory: where it came from, as far as it knows, and that it may have changed."""
    known = str(getattr(model.config, "_name_or_path", "") or type(model).__name__)
    return f"{known} (in memory)"
