"""Write the folder of a changed model, complete or not at all. No other module writes model folders.

Most tensors of a model do not change. Their places in the new files follow from the new shapes alone, so they can be
copied while the values of the others are still being computed.
"""

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, as_completed
from contextlib import contextmanager
from pathlib import Path
from threading import Event

from slimstate.checkpoints.card_header import with_original
from slimstate.checkpoints.reader import INDEX, WEIGHT_SUFFIXES, Checkpoint
from slimstate.checkpoints.safetensors_io import Change, TensorFileWriter, headers_after
from slimstate.core.file_names import CONFIG
from slimstate.families import Config
from slimstate.records.evaluation import EvaluationRecord
from slimstate.records.folder import check_model_folder
from slimstate.records.numbers import format_mib
from slimstate.records.training import ReconstructionRecord, RecoveryRecord, TrainingRecord
from slimstate.system import atomic, threads
from slimstate.system.errors import ModelError, OutputError
from slimstate.system.input_files import files_inside, open_regular
from slimstate.system.json_files import JsonObject
from slimstate.system.progress import SILENT, Reporter

CARD = "README.md"
BASE_CARD = "README.base.md"
ADAPTER, LOGS = "adapter", "runs"
# files about the training of the weights beside them, which do not apply to weights made from those
TRAINING_FILES = (ReconstructionRecord.FILE, RecoveryRecord.FILE, TrainingRecord.FILE, ADAPTER, LOGS)
WRITERS = 2  # threads, each with one tensor in memory; more would slow a running model down


class CheckpointWriter:
    """Write a model folder in two steps: `copy` starts copying what does not change, `finish` writes the rest."""

    def __init__(self, checkpoint: Checkpoint, outline: Change, folder: Path, out: Path, force: bool) -> None:
        self._checkpoint, self._folder, self._out, self._force = checkpoint, folder, out, force
        self._left_out = _copy_other_files(checkpoint, folder)
        for name in checkpoint.files:
            atomic.create_parents(folder / name, folder)
        self._files = [TensorFileWriter.create(file, folder / name, outline) for name, file in checkpoint.files.items()]
        self._pool, self._stopped, self._outline = threads.background_pool(WRITERS), Event(), outline
        self._copies: list[Future[None]] = []
        self._copied: set[str] = set()

    def copy(self, change: Change | None = None) -> None:
        """Start copying what does not change, best while a GPU works: copying slows other reading of files down."""
        change = change or self._outline
        for file in self._files:
            names = [name for name in file.source.tensors if name not in self._copied and not change.touches(name)]
            self._copies += [self._pool.submit(file.copy, name, self._stopped) for name in names]
            if names:
                self._copies.append(self._pool.submit(atomic.flush_to_disk, file.target))
            self._copied.update(names)

    def check(self) -> None:
        """Raise the error of a copy that has failed so far."""
        with atomic.writing(self._out):
            for copy in self._copies:
                if copy.done():
                    copy.result()

    def finish(
        self, change: Change, config: Config, documents: Mapping[str, str | Path], *, reporter: Reporter = SILENT
    ) -> list[str]:
        """Write changed tensors, and `documents` by name, texts or folders; publish, and return what was left out."""
        checkpoint, folder = self._checkpoint, self._folder
        with atomic.writing(self._out):
            self.copy(change)
            self._write_tensors(change, reporter)
            for name, file in zip(checkpoint.files, self._files, strict=True):
                file.check(checkpoint.digests[name].tensors)  # what was read matches the fingerprint
            checkpoint.check_unchanged()
            if checkpoint.index is not None:
                index = json.dumps(_resized_index(checkpoint, change), indent=2) + "\n"
                (folder / INDEX).write_text(index, encoding="utf-8")
            for name, document in documents.items():
                if isinstance(document, Path):
                    atomic.copy_files(document, folder / name)
                else:
                    text = with_original(document, checkpoint.folder) if name == CARD else document
                    (folder / name).write_text(text, encoding="utf-8")
            # last: no library loads a folder without it
            settings = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
            (folder / "config.json").write_text(settings, encoding="utf-8")
            check_output(checkpoint, self._out, self._force)  # somebody may have written there in the meantime
            atomic.publish(folder, self._out, self._force)
        return self._left_out

    def _write_tensors(self, change: Change, reporter: Reporter) -> None:
        names = [(file, name) for file in self._files for name in file.places if change.touches(name)]

        def tasks() -> Iterator[Future[None]]:
            yield from as_completed(self._copies)
            yield from as_completed([self._pool.submit(file.put, name, change) for file, name in names])

        label = f"writing {_bytes_after(self._checkpoint, change) / 2**20:,.0f} MiB"
        for task in reporter.track(tasks(), label, len(self._copies) + len(names)):
            task.result()

    def stop(self) -> None:
        self._stopped.set()
        self._pool.shutdown(cancel_futures=True)


@contextmanager
def new_checkpoint(checkpoint: Checkpoint, outline: Change, out: Path, *, force: bool) -> Iterator[CheckpointWriter]:
    """Yield a writer for `out`; `outline` has the shapes of the change. Nothing remains unless it is finished."""
    check_output(checkpoint, out, force)
    with atomic.staging_folder(out) as folder:
        check_output(checkpoint, out, force)  # a folder that a killed run had moved aside may be back
        with atomic.writing(out):
            size, free = _bytes_after(checkpoint, outline), shutil.disk_usage(folder).free
            if size > free:
                sizes = f"needs {format_mib(size)}, and {format_mib(free)} are free"
                raise OutputError(f"no space left: the new model {sizes}")
            writer = CheckpointWriter(checkpoint, outline, folder, out, force)
        try:
            yield writer
        finally:
            writer.stop()


def check_output(checkpoint: Checkpoint, out: Path, force: bool) -> None:
    """Refuse an output folder that exists or overlaps the model folder."""
    check_apart(checkpoint, out)
    check_model_folder(out, force)


def check_apart(checkpoint: Checkpoint, out: Path) -> None:
    """Refuse an output folder that overlaps the model folder."""
    if atomic.overlap(out, checkpoint.folder):
        raise OutputError(f"{out}: the output folder overlaps the model folder; choose another folder")


def _bytes_after(checkpoint: Checkpoint, change: Change) -> int:
    return sum(size for _, _, size in headers_after(checkpoint.tensors, change).values())


def _copy_other_files(checkpoint: Checkpoint, folder: Path) -> list[str]:
    """Copy everything but weights; return the names of weights in other formats, which are left out."""
    left_out = []
    trained = not {"reconstructed", "recovered", "trained"}.isdisjoint(checkpoint.config.get("slimstate") or {})
    for path in sorted(files_inside(checkpoint.folder, ModelError)):
        name = path.relative_to(checkpoint.folder)
        is_replaced = str(name) in (*checkpoint.files, INDEX, "config.json", CONFIG, EvaluationRecord.FILE)
        if is_replaced or (trained and name.parts[0] in TRAINING_FILES):
            continue
        if path.suffix in WEIGHT_SUFFIXES or path.name.endswith(".index.json"):
            left_out.append(str(name))
            continue
        is_base_card = str(name) == CARD and checkpoint.config.get("slimstate") is None
        target = folder / (BASE_CARD if is_base_card else name)
        atomic.create_parents(target, folder)
        with open_regular(path, ModelError) as source, target.open("wb") as copy:
            shutil.copyfileobj(source, copy)
    return left_out


def _resized_index(checkpoint: Checkpoint, change: Change) -> JsonObject:
    assert checkpoint.index is not None
    headers = headers_after(checkpoint.tensors, change)
    metadata = {**(checkpoint.index.get("metadata") or {}), "total_size": _bytes_after(checkpoint, change)}
    if "total_parameters" in metadata:
        before = sum(info.elements for info in checkpoint.tensors.values())
        metadata["total_parameters"] -= before - sum(math.prod(shape) for _, shape, _ in headers.values())
    places = {name: file for name, file in checkpoint.index["weight_map"].items() if name in headers}
    return {**checkpoint.index, "metadata": metadata, "weight_map": places}
