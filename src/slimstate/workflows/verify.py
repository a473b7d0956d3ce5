"""`slimstate verify`: run a model in a serving engine and compare its log-probabilities with those of transformers."""

import time
from pathlib import Path
from typing import Any

from slimstate.checkpoints.reader import Checkpoint
from slimstate.models.load import check_runnable
from slimstate.records.base import versions
from slimstate.records.folder import check_record
from slimstate.records.parts import Text
from slimstate.records.provenance import run_config
from slimstate.records.schema import from_json
from slimstate.records.serving import MASKED, MEASURE, VerificationRecord
from slimstate.serving.verification.verify import Comparison, masking_plan, read_windows
from slimstate.system.options import as_path
from slimstate.workflows.inputs import Progress, reporter_for
from slimstate.workflows.options import VerifyConfig


def verify(
    model: str | Path, config: VerifyConfig | None = None, *,
    out: str | Path | None = None, progress: Progress = True, **options: Any,
) -> VerificationRecord:  # fmt: skip
    """Run a model in a serving engine, in a process of its own, and compare its log-probabilities with transformers'.

    Exit code 0: they agree. 1: they differ. 2: the engine refuses the model, or is not installed.

    Parameters:
        model: A model folder or a hub id.
        out: File for the record, such as records/mlx.json.

    Returns:
        A record: `verdict` (agrees, differs or refuses, with the largest difference or the engine's error).

    Examples:
        >>> print(slimstate.verify("slim", engine="mlx", against="model").verdict)
    """
    start = time.perf_counter()
    config, path = VerifyConfig.merge(config, options), None if out is None else as_path(out)
    as_path(model, "model")
    if path is not None:
        check_record(path)
    checkpoint = Checkpoint.open(model)
    uncut = None if config.against is None else Checkpoint.open(config.against)
    if config.masked and uncut is not None:
        plan = masking_plan(checkpoint, uncut, config.plan)
    elif checkpoint.quantisation is not None:
        check_runnable(checkpoint, "compare it in its engine with `masked`")
    text = read_windows(checkpoint, config.comparison)
    comparison = Comparison(
        engine=config, tokens=text.tokens, options=config.comparison, run=config.run, masked=config.masked,
        reporter=reporter_for(progress),
    )  # fmt: skip
    if config.masked and uncut is not None:
        version, outcome = comparison.compare_masked(checkpoint, uncut, plan)
    else:
        version, outcome = comparison.compare(checkpoint)
    record = VerificationRecord(
        **vars(checkpoint.identity(checkpoint.folder.name)),
        engine=str(config.engine),
        engine_version=version,
        text=from_json(Text, text.describe()),
        dtype=config.run.precision_name,
        tolerance=comparison.tolerance,
        outcome=outcome,
        measure=MASKED if config.masked else MEASURE,
        against=None if uncut is None or config.masked else comparison.compare(uncut)[1],
        config=run_config("verify", {"model": model, "out": out}, config.to_values()),
        versions=versions(),
        seconds=time.perf_counter() - start,
    )
    if path is not None:
        record.write(path)
    return record
