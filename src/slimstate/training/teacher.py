"""The model that is learnt from: in the same process, or its best guesses in a folder that several runs share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Protocol

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from slimstate.checkpoints.reader import Checkpoint
from slimstate.data.corpus import Corpus
from slimstate.kernels.distillation import FullDistribution, TeacherDistribution, TopDistribution
from slimstate.models.devices import TOKENS_AT_ONCE
from slimstate.models.load import Runtime, load, states_before_head
from slimstate.models.options import RunOptions
from slimstate.system import distributed
from slimstate.system.atomic import staged_file
from slimstate.system.errors import DataError, OutputError
from slimstate.system.json_files import JsonObject, read_json, write_json
from slimstate.system.progress import SILENT, Reporter

FORMAT = 1
ABOUT = "teacher.json"
WINDOWS_IN_A_FILE = 64


class Teacher(Protocol):
    def distribution(self, ids: Tensor, places: Tensor) -> TeacherDistribution:
        """Of tokens 1 to T - 1 of windows `ids` [B, T], which lie at `places` [B] of the corpus."""


@dataclass(frozen=True, kw_only=True)
class LiveTeacher:
    """A model in memory."""

    runtime: Runtime

    def distribution(self, ids: Tensor, places: Tensor) -> FullDistribution:
        model = self.runtime.model
        with torch.inference_mode(), torch.autocast(ids.device.type, enabled=False):
            hidden = states_before_head(model, ids)[:, :-1].flatten(0, 1)
        # a copy made outside of inference mode may take part in a loss
        return FullDistribution(hidden=hidden.clone(), head=model.get_output_embeddings().weight.detach())


@dataclass(frozen=True, kw_only=True)
class TeacherCache:
    """A folder with the `top_k` best tokens of a teacher for every token of a corpus, with their log probabilities.

    What it is of is written beside it, and every file carries a digest of the tokens it belongs to. A file is whole or
    not there at all, so that filling it goes on where it was stopped; runs on more of the same text extend it.
    """

    folder: Path
    model: str
    dtype: str
    temperature: float
    top_k: int

    def describe(self) -> JsonObject:
        names = ("model", "dtype", "temperature", "top_k")
        return {"format": FORMAT, **{name: getattr(self, name) for name in names}}

    def check(self) -> None:
        """Refuse a folder that holds something else."""
        if self.folder.exists() and not self.folder.is_dir():
            raise OutputError(f"{self.folder} is a file; `cache_teacher` is a folder")
        if not (self.folder / ABOUT).exists():
            if self.folder.exists() and any(not path.name.startswith(".") for path in self.folder.iterdir()):
                raise OutputError(f"{self.folder} is not empty and no teacher cache; choose another place")
            return
        found = read_json(self.folder / ABOUT)
        for name, ours in self.describe().items():
            if found.get(name) != ours:
                raise DataError(f"{self.folder} is a teacher cache of another {name}: {found.get(name)}, not {ours}")

    def fill(self, corpus: Corpus, load: Callable[[], Runtime], reporter: Reporter = SILENT) -> bool:
        """Write what is missing; the teacher is loaded only where something is. True if anything was."""
        self.check()
        if distributed.is_main():
            write_json(self.folder / ABOUT, self.describe())
        starts = range(0, corpus.count, WINDOWS_IN_A_FILE)
        missing = [start for start in distributed.share(starts) if not self._holds(corpus, start)]
        if missing:
            teacher = LiveTeacher(runtime=load())
            for start in reporter.track(missing, f"caching the teacher's top {self.top_k}", len(missing)):
                self._write(corpus, start, teacher)
        distributed.wait_for_all()
        self.__dict__.pop("_opened", None)  # a file that was opened before may have been extended
        return bool(missing)

    def distribution(self, ids: Tensor, places: Tensor) -> TopDistribution:
        found = [self._read(place) for place in places.tolist()]
        tensors = [torch.cat(rows).to(ids.device) for rows in zip(*found, strict=True)]
        return TopDistribution(ids=tensors[0], log_probs=tensors[1])

    def _path(self, start: int) -> Path:
        return self.folder / f"windows-{start:08d}.safetensors"

    def _holds(self, corpus: Corpus, start: int) -> bool:
        """Whether the file of these windows is there and whole; one of other tokens is refused."""
        path, wanted = self._path(start), min(WINDOWS_IN_A_FILE, corpus.count - start)
        if not path.exists():
            return False
        try:
            held = (self._open(start).metadata() or {}).get("tokens", "").split()
        except (OSError, safetensors.SafetensorError) as error:
            raise DataError(f"{path} cannot be read: {error}") from error
        ours = _digests(corpus.tokens[start : start + wanted])
        if any(mine != theirs for mine, theirs in zip(ours, held, strict=False)):
            raise DataError(f"{path} is of other tokens than {corpus.source}: use another folder as `cache_teacher`")
        return len(held) >= wanted

    def _write(self, corpus: Corpus, start: int, teacher: LiveTeacher) -> None:
        tokens = corpus.tokens[start : start + WINDOWS_IN_A_FILE]
        device = teacher.runtime.device
        small = torch.uint16 if teacher.runtime.model.config.vocab_size <= 2**16 else torch.int32
        ids, log_probs = [], []
        for batch in torch.from_numpy(tokens.copy()).split(max(1, TOKENS_AT_ONCE[device.type] // corpus.length)):
            found = teacher.distribution(batch.to(device, torch.long), batch)
            for first in range(0, len(found.hidden), corpus.length - 1):
                rows = slice(first, first + corpus.length - 1)
                best = found.log_probs(rows, self.temperature).topk(self.top_k)
                ids.append(best.indices.to(small).cpu())
                log_probs.append(best.values.half().cpu())
        tensors = {"ids": torch.stack(ids), "log_probs": torch.stack(log_probs)}
        about = {"slimstate_teacher": str(FORMAT), "tokens": " ".join(_digests(tokens))}
        try:
            with staged_file(self._path(start)) as partial:
                safetensors.torch.save_file(tensors, partial, about)
        except (OSError, safetensors.SafetensorError) as error:
            raise OutputError(f"cannot write {self._path(start)}: {error}") from error

    def _open(self, start: int) -> Any:
        return safetensors.safe_open(self._path(start), framework="pt")

    @cached_property
    def _opened(self) -> Callable[[int], Any]:
        return lru_cache(maxsize=64)(self._open)

    def _read(self, place: int) -> tuple[Tensor, Tensor]:
        row = place % WINDOWS_IN_A_FILE
        file = self._opened(place - row)
        return file.get_slice("ids")[row], file.get_slice("log_probs")[row]


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """Who is learnt from and how much: `weight` of the divergence at a temperature beside the cross entropy.

    A teacher of no weight is only compared with.
    """

    teacher: Checkpoint
    weight: float
    temperature: float
    cache: TeacherCache | None = None

    def prepared(self, corpus: Corpus, run: RunOptions, reporter: Reporter) -> Teacher | None:
        """The teacher in memory, or the cache, filled; None of no weight."""
        if self.weight == 0:
            return None

        def bring() -> Runtime:
            with reporter.waiting("loading the teacher"):
                return load(self.teacher.folder, device=run.device, dtype=run.precision_name)

        if self.cache is None:
            return LiveTeacher(runtime=bring())
        made = self.cache.fill(corpus, bring, reporter)
        reporter.say(f"teacher: {'its best guesses are now in' if made else 'from'} {self.cache.folder}")
        return self.cache


def _digests(tokens: Any) -> list[str]:
    """One for every window."""
    return [hashlib.blake2b(window.tobytes(), digest_size=8).hexdigest() for window in tokens]
