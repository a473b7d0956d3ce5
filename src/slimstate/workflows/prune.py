"""`slimstate prune`: choose channels, cut them, and write a checkpoint that the stock class loads.

config -> SelectionJob -> Plan -> folder            everything before the plan decides, everything after it executes
                      \\-> reconstruct -> distill    optionally, layer by layer and then the whole model
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from slimstate.checkpoints.reader import Checkpoint
from slimstate.checkpoints.writer import check_output
from slimstate.data.text import Windows
from slimstate.models.load import load_tokenizer
from slimstate.pruning.cut import CutJob, LayerwiseCut, check_stock_shapes, dequantised_line, describe_cut
from slimstate.pruning.estimate import estimate_cut
from slimstate.pruning.evidence import read_windows
from slimstate.pruning.heads import chooses_origins, measure_origins
from slimstate.pruning.planning import SelectionJob, check_epsilon, check_rotatable, is_layerwise, read_plan
from slimstate.pruning.sizes import check_value_dim, dims_line, fit_budget, key_dims_worth_choosing, resolve_key_dim
from slimstate.reconstruction.options import ReconstructOptions
from slimstate.reconstruction.rates import reconstruction_tokens
from slimstate.reconstruction.reconstruct import ReconstructionJob
from slimstate.reconstruction.trained_layers import TrainedLayers
from slimstate.records.cut import CutRecord, EstimateRecord
from slimstate.records.evaluation import UNINFORMED
from slimstate.records.parts import Cut
from slimstate.records.plan import Plan
from slimstate.records.provenance import run_config
from slimstate.records.schema import from_json
from slimstate.records.serving import LayerSpeed
from slimstate.selectors import VALUE_METHODS, Request, Selector, selector_named, value_selector_named
from slimstate.selectors.ranking import KEEP_ALL
from slimstate.serving.engines import cut_advice, needs_equal_dims, serving_lines
from slimstate.serving.widths import speed_of_cut
from slimstate.system.errors import PlanError
from slimstate.system.options import as_path, prefixed
from slimstate.system.progress import Reporter
from slimstate.system.run_folders import path_beside
from slimstate.training.distill import DistillationJob
from slimstate.workflows.evaluate import evaluated
from slimstate.workflows.inputs import Inputs, Model, Progress, budget_dims, in_memory
from slimstate.workflows.options import PruneConfig, SweepConfig


def prune(
    model: Model, out: str | Path | None = None, config: PruneConfig | None = None, *,
    tokenizer: Any = None, progress: Progress = True, **options: Any,
) -> CutRecord:  # fmt: skip
    """Cut a model to fewer key/query channels per head and write a checkpoint that the stock class loads.

    Several processes share the calibration, and the main one writes.

    Parameters:
        model: A model folder or a hub id. In Python also a transformers model in memory.
        out: Folder for the cut model; it appears only when it is complete. Without it nothing is written, and the cut
            of a model in memory is `.cut_model` of the result.

    Returns:
        A record: `plan` (the kept channels, `plan.selections[layer].keep`), `path`, `state_bytes`, `certificate`, ...

    Examples:
        >>> cut = slimstate.prune("demo/model", "slim", key_dim=64, data="demo/calibration.txt")
        >>> cut.plan.selections[0].keep[0]          # channels that head 0 of layer 0 keeps
        >>> AutoModelForCausalLM.from_pretrained(cut.path)

        >>> cut = slimstate.prune(model, tokenizer=tokenizer, compression=0.5, data=["Some text.", ...])
        >>> cut.cut_model.generate(...)
    """
    config = PruneConfig.merge(config, options)
    config.refuse(("eval_text",), "measures what is written: give `out`", unless=out is not None)
    config.refuse(("reconstruct",), "trains what is written: give `out`", unless=out is not None or in_memory(model))
    with Inputs(progress, tokenizer, model) as inputs:
        methods = (selector_named(config.method), value_selector_named(_value_method(config)))
        reads_text = config.calibration.data is not None and any(method.calibrated for method in methods)
        source = inputs.model(model, reads_text=reads_text or config.evaluation.eval_text is not None)
        if out is not None or not in_memory(model):
            target = None if out is None else as_path(out)
            return evaluated(lambda: _prune(source, target, config, inputs.reporter), source, config, inputs)
        folder = inputs.folder() / "cut"
        record = _prune(source, folder, config, inputs.reporter)
        cut_model = type(model).from_pretrained(folder, dtype=model.dtype).to(model.device).train(model.training)
        return replace(record, out=None, cut_model=cut_model)


def estimate(
    model: Model, out: str | Path | None = None, config: PruneConfig | None = None, *,
    tokenizer: Any = None, progress: Progress = True, **options: Any,
) -> EstimateRecord:  # fmt: skip
    """Estimate how long the same call of `prune` takes and how much memory; no model is loaded, nothing is written.

    Parameters:
        model: As for `prune`, and so is `out`.

    Returns:
        A record: `seconds` and bytes (`gpu_bytes`, `host_bytes`, `disk_bytes`) of every stage.

    Examples:
        >>> slimstate.estimate("demo/model", key_dim=64, data="demo/calibration.txt").seconds["total"]
    """
    config = PruneConfig.merge(config, options)
    config.refuse(("eval_text", "reconstruct"), "is not part of an estimate: leave it out")
    if config.apply is not None:
        raise PlanError("`apply` has its plan and loads no model: there is nothing to estimate")
    with Inputs(progress, tokenizer, model) as inputs:
        checkpoint = _open(inputs.model(model), None if out is None else as_path(out), config, inputs.reporter)
        job = selection_job(checkpoint, config, inputs.reporter)
        return replace(estimate_cut(job), speed=_speed(checkpoint, job.request.keep, job.value_dim))


def _prune(source: str | PathLike[str], out: Path | None, config: PruneConfig, reporter: Reporter) -> CutRecord:
    started = time.perf_counter()
    if config.distill is not None and out is not None:
        return _cut_and_distil(source, out, config, reporter)
    checkpoint = _open(source, out, config, reporter)
    provenance = run_config("prune", {"model": source, "out": out}, config.to_values())
    choice: SelectionJob | Plan
    if config.apply is None:
        partial = None if out is None else path_beside(out, ".calibration")
        choice = replace(selection_job(checkpoint, config, reporter), partial=partial)
        key_dim, value_dim = choice.request.keep, choice.value_dim
    else:
        choice = plan = read_plan(config.apply, checkpoint, same_model=config.same_model)
        if plan.origin is not None:
            reporter.say(f"the channels were chosen on {plan.origin.source}, which is taken for the same model")
        key_dim, value_dim = plan.key_dim, plan.value_dim
        if config.evaluation.eval_text is None and (unused := config.run.to_values()):
            reporter.say(f"no effect with `apply`, which runs no model: {', '.join(f'`{name}`' for name in unused)}")
        method = plan.value_method if plan.method == KEEP_ALL.name else plan.method
        line = f"applying {config.apply}: {method}, {dims_line(checkpoint.mixers[0], key_dim, value_dim)}"
        _report_cut(checkpoint, (key_dim, value_dim), line, config.engine, reporter)
    cut = CutJob(
        checkpoint=checkpoint, key_dim=key_dim, value_dim=value_dim, out=out, force=config.force,
        provenance=provenance, speed=_speed(checkpoint, key_dim, value_dim), notes=serving_lines, reporter=reporter,
    )  # fmt: skip
    if config.reconstruct is None:
        return cut.finish(choice, started)
    assert isinstance(choice, SelectionJob)  # a plan is not reconstructed
    return _cut_and_reconstruct(cut, choice, config, started)


def _speed(checkpoint: Checkpoint, key_dim: int, value_dim: int | None) -> LayerSpeed | None:
    return speed_of_cut(checkpoint.family.model_type, checkpoint.mixers[0], key_dim, value_dim)


def _open(source: str | PathLike[str], out: Path | None, config: PruneConfig, reporter: Reporter) -> Checkpoint:
    """Open the model, and check that there is a place for its cut."""
    checkpoint = Checkpoint.open(source)
    if out is not None:
        check_output(checkpoint, out, config.force)
    if config.reconstruct is not None:
        checkpoint.check_plain("reconstructed")
    if checkpoint.cut is not None:
        reporter.say(f"cut before: {from_json(Cut, checkpoint.cut)}; both cuts are recorded")
    return checkpoint


def selection_job(checkpoint: Checkpoint, config: PruneConfig, reporter: Reporter) -> SelectionJob:
    """Return the job that chooses the channels, after the checks that need no loaded model; report the cut."""
    selector, calibration = selector_named(config.method), config.calibration
    key_dim, value_dim, line = _dims(checkpoint, config, allow_width=selector.rotates)
    if value_dim is not None and key_dim == checkpoint.mixers[0].axis.width and not selector.rotates:
        selector = KEEP_ALL
    config.refuse(("value_method",), "has no effect: only keys are cut", unless=bool(value_dim) or not config.engine)
    correctable = checkpoint.family.correction(checkpoint.config).possible
    corrected = correctable and not config.cut.keep_norm_eps
    if config.cut.keep_norm_eps and not correctable:
        reporter.say(f"no effect with {checkpoint.family.model_type}: `keep_norm_eps`")
    if config.cut.keep_heads and not chooses_origins(checkpoint):
        reporter.say(f"no effect with {checkpoint.family.model_type}: `keep_heads`")
    check_rotatable(checkpoint, selector)
    check_epsilon(checkpoint, key_dim, value_dim, corrected)
    values = None if value_dim is None else value_selector_named(_value_method(config))
    needs = selector.needs | (frozenset() if values is None else values.needs)
    layerwise = config.reconstruct is not None and is_layerwise(needs, calibration)
    methods = [each for each in (selector, values) if each is not None]
    if layerwise:
        reason = "has no effect: layers are calibrated on the windows of `reconstruct_samples` and `reconstruct_length`"
        config.refuse(("samples", "length"), reason)
        if config.run.device_map is not None and config.run.max_memory is None:
            reporter.say("no effect with `reconstruct`, which has one layer of each model in memory: `device_map`")
    report_unused(config, methods, reporter)
    windows = None if layerwise else read_windows(checkpoint, methods, calibration, reporter)
    _report_cut(checkpoint, (key_dim, value_dim), line, config.engine, reporter)
    request = Request(
        keep=key_dim, score=config.score, seed=calibration.seed, f=config.cut.rrqr_f, swaps=config.cut.rrqr_swaps,
        device=config.run.place.type,
    )  # fmt: skip
    return SelectionJob(
        checkpoint=checkpoint, selector=selector, corrected=corrected, calibration=calibration, windows=windows,
        request=request, value_selector=values, run=config.run, reporter=reporter,
        value_request=None if value_dim is None else replace(request, keep=value_dim),
    )  # fmt: skip


def report_unused(config: PruneConfig | SweepConfig, methods: Sequence[Selector], reporter: Reporter) -> None:
    """Report the options that differ from their defaults and that these methods do not read."""
    needs = frozenset[str]().union(*(method.needs for method in methods))
    names = [] if any("f" in method.options for method in methods) else ["rrqr_f", "rrqr_swaps"]
    names += [] if "gram" in needs else ["rrqr_rows"]
    keys = [method for method in methods if method not in VALUE_METHODS.values()]
    names += ["score", "scores"] if all(method.name in (*UNINFORMED, KEEP_ALL.name) for method in keys) else []
    if isinstance(config, PruneConfig) and not needs - {"weight"}:  # a sweep still measures condition numbers
        names += ["samples", "length", "evidence"]
        names += [] if config.reconstruct is not None else ["data"]
        if config.reconstruct is None and config.evaluation.eval_text is None:
            names += ["documents", "special_tokens", "device", "dtype", "device_map"]
            names += [] if any(method.name in UNINFORMED for method in methods) else ["seed"]
    elif (
        isinstance(config, PruneConfig) and config.calibration.data is None and config.calibration.evidence is not None
    ):
        names += ["samples", "length", "rrqr_rows", "seed"]  # all is in the file
    if isinstance(config, PruneConfig) and KEEP_ALL in methods:
        names += ["keep_norm_eps", "keep_heads", *(["method"] if _value_method(config) != config.method else [])]
    if unused := ", ".join(f"`{name}`" for name in names if name in config.to_values()):
        names = [each.name for each in methods if each is not KEEP_ALL]
        reporter.say(f"no effect with {' and '.join(names)}{' for values alone' * (KEEP_ALL in methods)}: {unused}")


def _value_method(config: PruneConfig) -> Any:
    """Return the method for values; by default energy, or that of the keys if it needs no text either."""
    default = config.method if config.method in ("random", "l1") else "energy"
    return default if config.value_method is None else config.value_method


def _dims(checkpoint: Checkpoint, config: PruneConfig, *, allow_width: bool) -> tuple[int, int | None, str]:
    """Return the key dim, the value dim (None: all) and a line on both; `allow_width` permits the full key dim."""
    width, value_dim, line = checkpoint.mixers[0].axis.width, config.value_dim, ""
    if config.budget.is_set:
        candidates = budget_dims(checkpoint.config, config.budget, config.engine)
        (key_dim, value_dim), line = fit_budget(config.budget, checkpoint.mixers, candidates)
        if (key_dim, value_dim) == (width, None):
            raise PlanError(f"{line}; nothing to cut")
    elif config.state_dim is not None:
        key_dim = value_dim = config.state_dim
    elif value_dim is not None and config.key_dim is None and config.compression is None:
        key_dim = width
    else:
        allow_width = allow_width or value_dim is not None
        key_dim, line = resolve_key_dim(width, config.compression, config.key_dim, allow_width=allow_width)
    values, engine = checkpoint.mixers[0].value_dim, config.engine
    equal = key_dim <= values and needs_equal_dims(checkpoint.config, engine, key_dim)
    if value_dim is None and (equal or checkpoint.family.one_width):
        value_dim = key_dim
    if value_dim is None:
        return key_dim, None, line
    resolve_key_dim(width, None, key_dim, allow_width=True)
    if value_dim == values and key_dim < width:  # equal dims may leave the values alone
        return key_dim, None, line or dims_line(checkpoint.mixers[0], key_dim, None)
    check_value_dim(checkpoint, key_dim, value_dim)
    if not config.budget.is_set:
        line = dims_line(checkpoint.mixers[0], key_dim, value_dim) + f": {engine} needs as many values as keys" * equal
    return key_dim, value_dim, line


def _report_cut(
    checkpoint: Checkpoint, dims: tuple[int, int | None], line: str, engine: str | None, reporter: Reporter
) -> None:
    """Check the shapes, and report the dims: their speed, and what engines do with them."""
    check_stock_shapes(checkpoint, *dims, reporter)
    reporter.say(line)
    if (price := dequantised_line(checkpoint, *dims)) is not None:
        reporter.say(price)
    if (speed := _speed(checkpoint, *dims)) is not None:
        reporter.say(speed.advice)
    candidates = key_dims_worth_choosing(checkpoint.mixers[0].axis.width)
    advice, rules = cut_advice(checkpoint.config, dims, engine, candidates)
    for line in advice:
        reporter.say(line)
    for line in rules:
        reporter.detail(line)


def _reconstruction_windows(checkpoint: Checkpoint, config: PruneConfig, reporter: Reporter) -> Windows:
    calibration = config.calibration
    assert config.reconstruct is not None
    reading = calibration.reading(calibration.data)
    with reporter.waiting(f"reading {calibration.data}"), prefixed("reconstruct_", ReconstructOptions):
        tokenizer = load_tokenizer(checkpoint.folder)
        return config.reconstruct.windows(tokenizer, reading, calibration.seed, config.run.place.type)


def _cut_and_reconstruct(cut_job: CutJob, job: SelectionJob, config: PruneConfig, started: float) -> CutRecord:
    """Cut and reconstruct layer by layer; the channels of a layer are chosen at that layer if the method allows it."""
    out, request = cut_job.out, job.request
    assert config.reconstruct is not None
    assert out is not None
    windows = _reconstruction_windows(job.checkpoint, config, job.reporter)
    settings = config.reconstruct.settings(config.run.place.type, windows)
    with job.reporter.then("the reconstruction", reconstruction_tokens(job.checkpoint, settings)):
        job = job if config.cut.keep_heads else replace(job, origins=measure_origins(job, windows.tokens))
        plan = None if is_layerwise(job.needs, config.calibration) else job.plan()[0]
    cut = LayerwiseCut(
        checkpoint=job.checkpoint, cut=cut_job, job=job, folder=TrainedLayers.beside(out).path,
        choices={} if plan is None else dict(plan.selections), plan=[] if plan is None else [plan],
    )  # fmt: skip
    identity = {
        "method": job.selector.name, "key_dim": request.keep, "score": request.score, "f": request.f,
        "swaps": request.swaps, "corrected": job.corrected, "keep_heads": config.cut.keep_heads,
        "plan": None if plan is None else plan.to_json(), "data": windows.source,
    }  # fmt: skip
    if job.value_selector is not None:
        identity |= {"value_dim": job.value_dim, "value_method": job.value_selector.name}
    record, left_out = ReconstructionJob(
        cut=cut, teacher=job.checkpoint, out=out, identity=identity, options=config.reconstruct, run=job.run,
        force=config.force, provenance=cut_job.provenance, reporter=job.reporter,
    ).finish(windows, started)  # fmt: skip
    seconds = time.perf_counter() - started
    return replace(cut.record(record), out=str(out), left_out=tuple(left_out), seconds=seconds)


def _cut_and_distil(source: str | PathLike[str], out: Path, config: PruneConfig, reporter: Reporter) -> CutRecord:
    """Cut and reconstruct in a separate folder, distil the result, and move the better model to `out`."""
    assert config.reconstruct is not None
    assert config.distill is not None
    checkpoint, values = Checkpoint.open(source), config.to_values()
    records: list[CutRecord] = []

    def cut_into(folder: Path) -> None:
        records.append(_prune(source, folder, replace(config, distill=None, force=True), reporter))

    job = DistillationJob(
        out=out, teacher=checkpoint, windows=_reconstruction_windows(checkpoint, config, reporter),
        steps=config.distill, batch=config.reconstruct.batch, identity={"model": checkpoint.fingerprint, **values},
        provenance=run_config("prune", {"model": source, "out": out}, values), run=config.run, force=config.force,
        reporter=reporter,
    )  # fmt: skip
    record = job.finish(cut_into)
    if not records:
        plan = read_plan(out, checkpoint)
        records.append(describe_cut(checkpoint, plan, record.kernels, _speed(checkpoint, plan.key_dim, plan.value_dim)))
    return replace(records[0], reconstruction=record, out=str(out))
