"""The teacher of a distillation: a model in memory, or its most likely tokens in a folder that several runs share."""

import hashlib
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from slimstate.checkpoints.reader import Checkpoint
from slimstate.data.corpus import Corpus
from slimstate.kernels.distillation import FullDistribution, TopDistribution
from slimstate.models.devices import TOKENS_AT_ONCE
from slimstate.models.load import Runtime, load, load_tokenizer, states_before_head
from slimstate.models.options import RunOptions
from slimstate.system import distributed
from slimstate.system.atomic import staged_file
from slimstate.system.errors import DataError, ModelError, OutputError, PlanError
from slimstate.system.json_files import JsonObject, read_json, write_json
from slimstate.system.progress import SILENT, Reporter
from slimstate.system.value import Value
from slimstate.training.options import TeacherOptions

FORMAT = 1
ABOUT = "teacher.json"
WINDOWS_IN_A_FILE = 64


class LiveTeacher(Value):
    """A model in memory."""

    runtime: Runtime

    def distribution(self, ids: Tensor, places: Tensor) -> FullDistribution:
        """Return the distribution of tokens 1 to T - 1 of windows `ids` [B, T], at `places` [B] of the corpus."""
        model = self.runtime.model
        with torch.inference_mode(), torch.autocast(ids.device.type, enabled=False):
            hidden = states_before_head(model, ids)[:, :-1].flatten(0, 1)
        head = model.get_output_embeddings().weight.detach()
        # a copy made outside of inference mode may take part in a loss; Mamba-2 has these states in float32
        return FullDistribution(hidden=hidden.to(head.dtype, copy=True), head=head)


class TeacherCache(Value):
    """A folder with the `top_k` most likely tokens for every position of a corpus, and their log probabilities.

    A file beside them describes the teacher, and every file of tokens has a digest of the windows it belongs to. Files
    appear only when they are complete, so an interrupted run continues; runs on more of the same text add files.
    """

    folder: Path
    model: str
    dtype: str
    temperature: float
    top_k: int

    def describe(self) -> JsonObject:
        return {"format": FORMAT, **{name: value for name, value in vars(self).items() if name != "folder"}}

    def check(self) -> None:
        """Raise an error if the folder has other contents than this cache."""
        if self.folder.exists() and not self.folder.is_dir():
            raise OutputError(f"`cache_teacher` must be a folder, {self.folder} is a file")
        if not (self.folder / ABOUT).exists():
            if self.folder.exists() and any(not path.name.startswith(".") for path in self.folder.iterdir()):
                raise OutputError(f"{self.folder} is not empty and not a teacher cache; choose another folder")
            return
        about = read_json(self.folder / ABOUT)
        for name, value in self.describe().items():
            if about.get(name) != value:
                raise DataError(f"{self.folder} is a teacher cache of another {name}: {about.get(name)}, not {value}")

    def fill(self, corpus: Corpus, load: Callable[[], Runtime], reporter: Reporter = SILENT) -> bool:
        """Write what is missing, with a teacher that is loaded only then; return whether anything was written."""
        self.check()
        if distributed.is_main():
            write_json(self.folder / ABOUT, self.describe())
        starts = range(0, corpus.count, WINDOWS_IN_A_FILE)
        missing = [start for start in distributed.share(starts) if not self._has(corpus, start)]
        if missing:
            teacher = LiveTeacher(runtime=load())
            label, tokens = f"caching the teacher's top {self.top_k}", WINDOWS_IN_A_FILE * corpus.length
            for start in reporter.track(missing, label, len(missing), tokens):
                self._write(corpus, start, teacher)
        distributed.wait_for_all()
        return bool(missing)

    def distribution(self, ids: Tensor, places: Tensor) -> TopDistribution:
        windows = [self._read(place) for place in places.tolist()]
        tensors = [torch.cat(rows).to(ids.device) for rows in zip(*windows, strict=True)]
        return TopDistribution(ids=tensors[0], log_probs=tensors[1])

    def _path(self, start: int) -> Path:
        return self.folder / f"windows-{start:08d}.safetensors"

    def _has(self, corpus: Corpus, start: int) -> bool:
        """Return whether the file of these windows is complete; refuse one of other tokens."""
        path, count = self._path(start), min(WINDOWS_IN_A_FILE, corpus.count - start)
        if not path.exists():
            return False
        try:
            stored = (self._open(start).metadata() or {}).get("tokens", "").split()
        except (OSError, safetensors.SafetensorError) as error:
            raise DataError(f"{path} cannot be read: {error}") from error
        digests = _digests(corpus.tokens[start : start + count])
        if any(mine != theirs for mine, theirs in zip(digests, stored, strict=False)):
            raise DataError(f"{path} belongs to other tokens than {corpus.source}: choose another `cache_teacher`")
        return len(stored) >= count

    def _write(self, corpus: Corpus, start: int, teacher: LiveTeacher) -> None:
        tokens = corpus.tokens[start : start + WINDOWS_IN_A_FILE]
        device = teacher.runtime.device
        small = torch.uint16 if teacher.runtime.model.config.get_text_config().vocab_size <= 2**16 else torch.int32
        ids, log_probs = [], []
        for batch in torch.from_numpy(tokens.copy()).split(max(1, TOKENS_AT_ONCE[device.type] // corpus.length)):
            predicted = teacher.distribution(batch.to(device, torch.long), batch)
            for first in range(0, len(predicted.hidden), corpus.length - 1):
                rows = slice(first, first + corpus.length - 1)
                best = predicted.log_probs(rows, self.temperature).topk(self.top_k)
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

    def _read(self, place: int) -> tuple[Tensor, Tensor]:
        row = place % WINDOWS_IN_A_FILE
        file = self._open(place - row)
        return file.get_slice("ids")[row], file.get_slice("log_probs")[row]


Teacher = LiveTeacher | TeacherCache


class Distillation(Value):
    """A teacher, and the weight and temperature of its loss; with weight 0 the teacher is only measured."""

    teacher: Checkpoint
    weight: float
    temperature: float
    cache: TeacherCache | None = None

    @classmethod
    def of(cls, teacher: Checkpoint, options: TeacherOptions, run: RunOptions) -> "Distillation":
        cache = None
        if options.cache_teacher is not None:
            top_k = min(options.cache_top_k, int(teacher.language_config["vocab_size"]) - 1)
            cache = TeacherCache(
                folder=options.cache_teacher, model=teacher.fingerprint, dtype=run.precision_name,
                temperature=options.temperature, top_k=top_k,
            )  # fmt: skip
        return cls(teacher=teacher, weight=options.kd_weight, temperature=options.temperature, cache=cache)

    def load(self, corpus: Corpus, run: RunOptions, reporter: Reporter) -> Teacher | None:
        """Return the teacher in memory, or the cache after filling it; None for weight 0."""
        if self.weight == 0:
            return None

        def load_teacher() -> Runtime:
            with reporter.waiting("loading the teacher"):
                return load(self.teacher.folder, device=run.device, dtype=run.precision_name)

        if self.cache is None:
            return LiveTeacher(runtime=load_teacher())
        is_new = self.cache.fill(corpus, load_teacher, reporter)
        reporter.say(f"teacher: {'its most likely tokens are now in' if is_new else 'from'} {self.cache.folder}")
        return self.cache


def find_teacher(student: Checkpoint, source: str | PathLike[str] | None, reporter: Reporter) -> Checkpoint:
    """Return the uncut model, by default the one that the student was cut from; refuse one with other tokens."""
    if source is None:
        source = (student.cut or {}).get("base_model")
        if source is None or not Path(source).is_dir():
            raise PlanError("give the uncut model with `teacher`, or `no_teacher` to learn from the text alone")
        reporter.say(f"teacher: {source}, which the model was cut from")
    teacher = Checkpoint.open(source)
    sizes = [checkpoint.language_config.get("vocab_size") for checkpoint in (student, teacher)]
    if sizes[0] != sizes[1]:
        raise ModelError(f"{student.source} has a vocabulary of {sizes[0]}, the teacher {source} one of {sizes[1]}")
    if load_tokenizer(student.folder).get_vocab() != load_tokenizer(teacher.folder).get_vocab():
        raise ModelError(f"{student.source} and the teacher {source} have different tokenizers")
    return teacher


def _digests(tokens: Any) -> list[str]:
    return [hashlib.blake2b(window.tobytes(), digest_size=8).hexdigest() for window in tokens]
