"""Distil a whole model for some steps after its reconstruction, on the same text; the result is used only if it helps.

All weights of the mixers learn from the uncut model and hardly from the text, which is short and would be memorised.
Each window is there twice, as it is and with repetitions, which show what a state still remembers. The windows that the
reconstruction held out are held out here too, and decide.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from slimstate.checkpoints.model_card import with_distillation
from slimstate.checkpoints.reader import Checkpoint
from slimstate.checkpoints.writer import CARD, check_output
from slimstate.data.corpus import Corpus
from slimstate.data.text import Windows, repeating
from slimstate.models.options import LoadOptions
from slimstate.models.speed import WITH_GRADIENT
from slimstate.reconstruction.options import count_held_out
from slimstate.records.training import DistillationResult, ReconstructionRecord, RecoveryRecord
from slimstate.system import distributed
from slimstate.system.atomic import publish, write_text
from slimstate.system.json_files import read_json, write_json
from slimstate.system.progress import Reporter
from slimstate.system.run_folders import RunFolder
from slimstate.system.value import Value
from slimstate.training.options import RecoverOptions, TrainOptions
from slimstate.training.run_checkpoints import TrainingFolder
from slimstate.training.session import RECOVERY_KIND, Job, Session
from slimstate.training.teacher import Distillation
from slimstate.training.tokens import Tokens

LEARNING_RATE = 2e-4
TEACHER_WEIGHT = 100.0  # beside the cross entropy
BATCH = {"cuda": 16, "cpu": 4}
RECONSTRUCTED, DISTILLED = "reconstructed", "distilled"  # folders with the model before and after
WINNER = "winner.json"  # which of them takes the place of the output


@dataclass(frozen=True)
class DistillationFolder(RunFolder):
    """The folder of an unfinished distillation: the model before and after it, and their own run folders."""

    WORK = "distillation"
    REQUIRED_SETTINGS = frozenset({"distill", "windows"})

    def has_progress(self) -> bool:
        return any(self.path.glob(f"{RECONSTRUCTED}/*"))


class DistillationJob(Value):
    """Reconstruct a model in a folder of its own and distil it there; the better of both is moved to `out`.

    A run that was interrupted continues if `identity` and all settings are the same. `provenance` is the config of the
    run, `windows` are those of the reconstruction.
    """

    out: Path
    teacher: Checkpoint
    windows: Windows
    steps: int
    batch: int | None
    identity: Mapping[str, object]
    provenance: Mapping[str, Any]
    run: LoadOptions
    force: bool
    reporter: Reporter

    def finish(self, reconstruct: Callable[[Path], object]) -> ReconstructionRecord:
        """Call `reconstruct` with the folder to write to, distil the result, and return the record."""
        if not self._is_published():
            check_output(self.teacher, self.out, self.force)
            options = self._options(resume=False)  # checked here, before the reconstruction
            options.settings()
            options.check_environment()
        settings = {"distill": self.steps, "windows": self.windows.digest, **self.identity}
        folder, name = self._folder, self.out.name
        with folder.open(settings, self.reporter, force=self.force, prepare=lambda: None):
            if self._is_published():  # an earlier run had only its own folder left to remove
                return ReconstructionRecord.read(self.out / ReconstructionRecord.FILE)
            reconstructed = folder.path / RECONSTRUCTED / name
            if not reconstructed.is_dir():
                with self.reporter.then("the distillation", self._tokens):
                    reconstruct(reconstructed)
            return self._distil(reconstructed, folder.path / DISTILLED / name)

    @property
    def _folder(self) -> DistillationFolder:
        return DistillationFolder.beside(self.out)

    @property
    def _batch(self) -> int:
        return self.batch or BATCH[self.run.place.type]

    @property
    def _tokens(self) -> float:
        """The cost of all steps, in tokens once forward through the model: the student's and its teacher's."""
        return (WITH_GRADIENT + 1) * self.steps * self._batch * self.windows.tokens.shape[1]

    def _is_published(self) -> bool:
        """Return whether the output is the folder that was moved there from here, which keeps its inode."""
        path = self._folder.path / WINNER
        return path.is_file() and self.out.is_dir() and read_json(path).get("inode") == self.out.stat().st_ino

    def _distil(self, reconstructed: Path, folder: Path) -> ReconstructionRecord:
        student = Checkpoint.open(reconstructed)
        inner = ReconstructionRecord.read(reconstructed / ReconstructionRecord.FILE)
        card = (reconstructed / CARD).read_text(encoding="utf-8")
        if folder.is_dir():  # an earlier run got this far
            recovery = RecoveryRecord.read(folder / RecoveryRecord.FILE)
        else:
            session = self._session(folder, card)
            fingerprints = {"model": student.fingerprint, "teacher": self.teacher.fingerprint}
            with session.open(lambda: student, fingerprints) as tokens:
                recovery = session.run_training(Job(student=student, out=folder, source=str(self.out)), tokens)
        before, after = recovery.measured.nats.before, recovery.measured.nats.after
        result = DistillationResult(steps=self.steps, before=before, after=after, taken=after < before)
        record = replace(inner, config=self.provenance, distillation=result, out=str(self.out))
        documents = {**record.files(), CARD: with_distillation(card, record, recovery, inner.command)}
        self.reporter.say(result.line())

        def move() -> None:
            winner = folder if result.taken else reconstructed
            for name, text in documents.items():
                write_text(winner / name, text)
            write_json(self._folder.path / WINNER, {"inode": winner.stat().st_ino})
            publish(winner, self.out, self.force)

        distributed.from_main(move)
        return record

    def _options(self, *, resume: bool) -> RecoverOptions:
        return RecoverOptions.from_values({
            "steps": self.steps, "length": self.windows.tokens.shape[1], "lr": LEARNING_RATE,
            "min_lr": LEARNING_RATE / 20, "batch_size": self._batch, "mixers": True, "kd_weight": TEACHER_WEIGHT,
            "temperature": 1.0, "data": self.windows.source, "seed": self.windows.seed, "report_to": "none",
            "resume": resume, "device": self.run.device, "dtype": self.run.dtype,
        })  # fmt: skip

    def _session(self, folder: Path, card: str) -> Session[RecoveryRecord]:
        options = self._options(resume=TrainingFolder.beside(folder).path.is_dir())
        kind = replace(
            RECOVERY_KIND, label="distilling", how_to_continue="the same command continues it",
            facts=lambda student: {"out": str(self.out), "distilled": True}, card=lambda *_: card,
        )  # fmt: skip
        return Session(
            kind=kind, out=folder, options=options, provenance=self.provenance,
            distillation=Distillation.of(self.teacher, options.distillation, options.run),
            read_tokens=self._read_tokens, reporter=self.reporter,
        )  # fmt: skip

    def _read_tokens(self, options: TrainOptions, tokenizer: Any, folder: Path, reporter: Reporter) -> Tokens:
        """Return the windows of the reconstruction; those that it held out are held out here, too."""
        if Corpus.exists_in(folder):
            return Tokens.of_corpus(Corpus.open(folder), tokenizer)
        count, windows = count_held_out(len(self.windows.tokens)), self.windows
        training, held_out = windows.tokens[count:], windows.tokens[:count]
        training = torch.cat([training, repeating(training, windows.seed)])
        corpus = Corpus.of_windows(training, held_out, windows.source, windows.documents, folder)
        return Tokens.of_corpus(corpus, tokenizer)
