"""Inputs of a workflow: models in folders, on the hub or in memory, tokenizers, and the reporter of progress.

A model in memory is written to a temporary folder with `save_pretrained`; from there on it is treated as any other, and
its fingerprint is that of the bytes that were written. The folder is removed at the end of the workflow.
"""

import os
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

from slimstate.pruning.options import Budget
from slimstate.system.errors import ModelError, PlanError, quoted, reason_of
from slimstate.system.progress import SILENT, Reporter
from slimstate.system.value import Value

Model: TypeAlias = Any  # str | PathLike[str] | torch.nn.Module
Progress: TypeAlias = bool | Reporter


def reporter_for(progress: Progress) -> Reporter:
    """Return the reporter itself, or one for the terminal or the notebook, or a silent one."""
    if isinstance(progress, Reporter):
        return progress
    if not progress:
        return SILENT
    from slimstate.system.notebook import NotebookReporter, in_notebook

    if in_notebook():
        return NotebookReporter()
    from slimstate.system.console import TerminalReporter

    return TerminalReporter()


def budget_dims(config: Mapping[str, Any], budget: Budget, engine: str | None) -> list[tuple[int, int | None]]:
    """Return the dims that a budget chooses from: equal ones for an engine that serves no others."""
    from slimstate.pruning.sizes import dims_worth_choosing
    from slimstate.serving.engines import needs_equal_dims

    candidates = dims_worth_choosing(config, budget.axes)
    equal = any(needs_equal_dims(config, engine, key_dim) for key_dim, _ in candidates)
    return dims_worth_choosing(config, equal=True) if equal else candidates


def in_memory(model: Model) -> bool:
    """Return whether a model is a module in memory, without importing torch for it."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(model, torch.nn.Module)


class StoredModel(Value, PathLike[str]):
    """A model in memory that was written to a folder: opened by its folder, shown by its name."""

    folder: Path
    name: str

    def __fspath__(self) -> str:
        return str(self.folder)

    def __str__(self) -> str:
        return self.name


class Inputs(ExitStack):
    """The models of one workflow; what was written for them is removed at its end."""

    def __init__(self, progress: Progress, tokenizer: Any = None, *models: Model) -> None:
        if tokenizer is not None and not any(map(in_memory, models)):
            raise PlanError("a model in a folder has its own tokenizer: leave out `tokenizer`")
        if tokenizer is not None and not hasattr(tokenizer, "save_pretrained"):
            kind = quoted(type(tokenizer).__name__)
            raise PlanError(f"`tokenizer` must be a tokenizer of transformers, got {kind}")
        super().__init__()
        self.tokenizer, self.reporter = tokenizer, reporter_for(progress)

    def folder(self) -> Path:
        """Return a new folder that lasts as long as the workflow."""
        return Path(self.enter_context(tempfile.TemporaryDirectory(prefix="slimstate-")))

    def model(self, model: Model, *, reads_text: bool = True) -> str | PathLike[str]:
        """Return the folder or hub id of a model; a model in memory is written to a temporary folder."""
        if isinstance(model, (str, os.PathLike)):
            return model
        if not in_memory(model):
            kind = quoted(type(model).__name__)
            raise ModelError(f"a model must be a folder, a hub id or a transformers model, got {kind}")
        if any(hasattr(module, "_orig_mod") for module in model.modules()):
            raise ModelError("a compiled model cannot be cut: give the model as it was before torch.compile")
        if hasattr(model, "merge_and_unload"):
            raise ModelError("a model with PEFT adapters cannot be cut: merge them first, `model.merge_and_unload()`")
        if not hasattr(model, "save_pretrained") or not hasattr(model, "config"):
            raise ModelError(f"a model in memory must be a transformers model, got {type(model).__name__}")
        if reads_text and self.tokenizer is None:
            raise PlanError("give the `tokenizer` of the model in memory too: it reads the text")
        folder = self.folder() / "model"
        with self.reporter.waiting("writing the model in memory to a temporary folder"):
            try:
                model.save_pretrained(folder)
                if self.tokenizer is not None:
                    self.tokenizer.save_pretrained(folder)
            except Exception as error:  # of many kinds: shared tensors, a full disk, no names
                raise ModelError(f"save_pretrained of {type(model).__name__} fails: {reason_of(error)}") from error
        name = str(getattr(model.config, "_name_or_path", "") or type(model).__name__)
        return StoredModel(folder=folder, name=f"{name} (in memory)")
