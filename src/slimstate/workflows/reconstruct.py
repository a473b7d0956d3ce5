"""`slimstate reconstruct`: train each cut layer to match the output of the uncut layer, on text alone."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from slimstate.checkpoints.reader import Checkpoint
from slimstate.checkpoints.writer import check_apart, check_output
from slimstate.models.load import check_tensor_names, load_tokenizer
from slimstate.models.options import LoadOptions
from slimstate.reconstruction.reconstruct import ReconstructionJob, find_uncut_model
from slimstate.reconstruction.walk import StoredCut
from slimstate.records.provenance import run_config
from slimstate.records.training import ReconstructionRecord
from slimstate.system.errors import PlanError
from slimstate.system.options import as_path
from slimstate.training.distill import DistillationJob
from slimstate.workflows.evaluate import evaluated
from slimstate.workflows.inputs import Inputs, Model, Progress
from slimstate.workflows.options import ReconstructConfig


def reconstruct(
    model: Model, out: str | Path, config: ReconstructConfig | None = None, *,
    tokenizer: Any = None, progress: Progress = True, **options: Any,
) -> ReconstructionRecord:  # fmt: skip
    """Train each cut layer to match the output of the uncut layer, with one layer in memory at a time.

    Interrupted, the same command continues at the layer it was in. Several processes share the windows, and the main
    one writes.

    Parameters:
        model: Folder of a model that slimstate cut, or the model loaded from it.
        out: Folder for the reconstructed model; it appears only when it is complete.

    Returns:
        A record: `error_before` and `error_after`, for the model and for each of its `layers`.

    Examples:
        >>> slimstate.reconstruct("slim", "better", data="demo/calibration.txt", teacher="demo/model")
    """
    started = time.perf_counter()
    config = ReconstructConfig.merge(config, options)
    if config.data is None:
        raise PlanError("a reconstruction trains on text: give it with `data`")
    spread: Any = "auto" if config.max_memory else None
    run = LoadOptions(**vars(config.run), max_memory=config.max_memory, device_map=spread)
    with Inputs(progress, tokenizer, model, config.teacher) as inputs:
        reporter, out = inputs.reporter, as_path(out)
        teacher = None if config.teacher is None else inputs.model(config.teacher)
        source = inputs.model(model)
        cut = Checkpoint.open(source)
        cut.check_plain("reconstructed")
        check_apart(cut, out)
        uncut = find_uncut_model(cut, teacher, reporter)
        provenance = run_config("reconstruct", {"model": source, "out": out}, config.to_values())
        with reporter.waiting(f"reading {config.data}"):
            text, tokens = config.reading(config.data), load_tokenizer(uncut.folder)
            windows = config.training.windows(tokens, text, config.seed, run.place.type)

        def reconstruct_into(folder: Path, force: bool) -> ReconstructionRecord:
            for checkpoint in (cut, uncut):
                check_output(checkpoint, folder, force)
                check_tensor_names(checkpoint)
            identity = {"model": cut.fingerprint, "data": str(config.data)}
            return ReconstructionJob(
                cut=StoredCut(cut), teacher=uncut, out=folder, identity=identity, options=config.training, run=run,
                force=force, provenance=provenance, reporter=reporter,
            ).finish(windows, started)[0]  # fmt: skip

        def work() -> ReconstructionRecord:
            if config.distill is None:
                return reconstruct_into(out, config.force)
            identity = {"model": cut.fingerprint, **config.to_values(), "teacher": uncut.fingerprint}
            return DistillationJob(
                out=out, teacher=uncut, windows=windows, steps=config.distill, batch=config.training.batch,
                identity=identity, provenance=provenance, run=run, force=config.force, reporter=reporter,
            ).finish(lambda folder: reconstruct_into(folder, True))  # fmt: skip

        return evaluated(work, uncut.source if teacher is None else teacher, replace(config, run=run), inputs)
