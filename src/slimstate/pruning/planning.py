"""Choose the channels that every mixer keeps, from evidence, or read the plan that an earlier choice wrote."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path

import torch
from torch import Tensor

from slimstate.checkpoints.reader import Checkpoint
from slimstate.core.effective_rank import gram_condition_number
from slimstate.core.evidence import BACKWARD, Evidence, EvidenceFile, Needs
from slimstate.core.layout import Mixer, Slot, ValueAxis
from slimstate.core.selection import Basis, Choice, Selection
from slimstate.core.surgery import Cutter, check_choice, remaining_channels
from slimstate.data.text import Windows
from slimstate.families import loader_of
from slimstate.families.contract import MAX_EPSILON
from slimstate.models.options import LoadOptions
from slimstate.pruning.evidence import EvidenceCollector
from slimstate.pruning.options import Calibration
from slimstate.records.base import versions
from slimstate.records.parts import Text
from slimstate.records.plan import Plan, SourceModel, read_plan_file
from slimstate.records.schema import from_json
from slimstate.selectors import Case, Request, Selector, channel_methods, choose
from slimstate.system import threads
from slimstate.system.errors import PlanError, quoted
from slimstate.system.json_files import JsonObject, plain
from slimstate.system.progress import SILENT, Reporter
from slimstate.system.value import Value


class SelectionJob(Value):
    """A choice of channels with everything it needs; requests have the key dim and any value dim."""

    checkpoint: Checkpoint
    selector: Selector
    request: Request
    value_selector: Selector | None = None
    value_request: Request | None = None
    corrected: bool
    calibration: Calibration
    windows: Windows | None
    run: LoadOptions
    partial: Path | None = None  # file for the sums of an unfinished calibration
    origins: Mapping[int, Tensor] = field(default_factory=dict)  # of heads that are made from others, by layer
    reporter: Reporter = SILENT

    @property
    def needs(self) -> Needs:
        return self.selector.needs | (frozenset() if self.value_selector is None else self.value_selector.needs)

    @property
    def value_dim(self) -> int | None:
        return None if self.value_request is None else self.value_request.keep

    def plan(self, on_idle: Callable[[], None] = lambda: None) -> tuple[Plan, str | None]:
        """Return the plan and the kernels that ran for it; `on_idle` is called once, when there is time for it."""
        collector = EvidenceCollector(
            calibration=self.calibration, windows=self.windows, run=self.run, on_idle=on_idle, partial=self.partial
        )
        evidence, kernels = collector.collect(self.checkpoint, self.needs, self.reporter)
        on_idle()  # where no model had to run
        return self.choose(evidence), kernels

    def choose(self, file: EvidenceFile | None) -> Plan:
        """Return the plan with the channels of every mixer, chosen from the evidence."""
        check_rotatable(self.checkpoint, self.selector)
        choices = self.choices(self.checkpoint.mixers, {} if file is None else file.evidence)
        return plan_of(self, choices, None if file is None else dict(file.calibration))

    def choices(self, mixers: Sequence[Mixer], evidence: Mapping[int, Evidence]) -> dict[int, Choice]:
        """Return what every mixer keeps, by layer."""
        read_rows, layers = self.checkpoint.read_rows, [mixer.layer for mixer in mixers]
        each = cases(read_rows, mixers, self.selector.needs, evidence)
        if len(mixers) > 1:
            each = self.reporter.track(each, "choosing", len(mixers))
        selections = list(choose(self.selector, each, self.request))
        for place, mixer in enumerate(mixers):
            if mixer.layer in self.origins:
                selections[place] = self._choose_from(self.origins[mixer.layer], mixer, evidence, selections[place])
        with threads.pool_of_all_cores() as pool:  # an eigenvalue problem for every head
            choices = list(pool.map(certify, selections, map(evidence.get, layers)))
        if self.value_selector is not None and self.value_request is not None:
            each = cases(read_rows, mixers, self.value_selector.needs, evidence, of_values=True)
            values = map(remaining_channels, choose(self.value_selector, each, self.value_request))
            choices = [
                replace(choice, values=own if (heads := choice.origins) is None else own[mixer.value_origins(heads)])
                for mixer, choice, own in zip(mixers, choices, values, strict=True)
            ]
        return dict(zip(layers, choices, strict=True))

    def _choose_from(self, origins: Tensor, mixer: Mixer, evidence: Mapping[int, Evidence], own: Choice) -> Choice:
        """Return the choice of a mixer whose heads are made from others; n copies of one share n times the channels."""
        keep, copies, width = self.request.keep, torch.bincount(origins).tolist(), mixer.axis.width
        channels = {1: remaining_channels(own)}
        for count in {*copies} - {0, 1}:
            channels[count] = torch.arange(width).expand(mixer.axis.heads, -1)
            if count * keep < width:
                each = cases(self.checkpoint.read_rows, [mixer], self.selector.needs, evidence)
                (wider,) = choose(self.selector, each, replace(self.request, keep=count * keep))
                channels[count] = remaining_channels(wider)
        parts = {head: divide(channels[count][head], count, keep) for head, count in enumerate(copies) if count}
        return Selection(keep=torch.stack([parts[head].pop(0) for head in origins.tolist()]), origins=origins)


def divide(channels: Tensor, copies: int, key_dim: int) -> list[Tensor]:
    """Divide the channels of a head among its copies in turn; each copy has `key_dim` of them, ascending."""
    parts = [channels[copy::copies] for copy in range(copies)]
    return [torch.cat(parts[copy:] + parts[:copy])[:key_dim].sort().values for copy in range(copies)]


def plan_of(job: SelectionJob, choices: Mapping[int, Choice], calibration: JsonObject | None) -> Plan:
    """Return the plan of these choices, with everything needed to repeat and to judge them."""
    checkpoint, selector, request = job.checkpoint, job.selector, job.request
    with job.reporter.waiting("reading the weights for their fingerprint"):
        _ = checkpoint.fingerprint
    epsilon, first = check_epsilon(checkpoint, request.keep, job.value_dim, job.corrected), checkpoint.mixers[0]
    return Plan(
        model_type=checkpoint.family.model_type,
        width=first.axis.width,
        key_dim=request.keep,
        value_width=None if job.value_dim is None else first.value_dim,
        value_dim=job.value_dim,
        value_method=None if job.value_selector is None else job.value_selector.name,
        method=selector.name,
        score=request.score,
        seed=request.seed,
        corrected=job.corrected,
        options={name: value for name in selector.options if (value := getattr(request, name)) is not None},
        model=source_model(checkpoint),
        calibration=None if calibration is None else from_json(Text, calibration),
        versions=versions(),
        selections=choices,
        parent=None if checkpoint.plan is None else checkpoint.plan.to_json(),
        correction="; ".join(_corrections(job, choices, epsilon)),
    )


def source_model(checkpoint: Checkpoint) -> SourceModel:
    loader = loader_of(checkpoint.family.model_type)
    return SourceModel(source=checkpoint.source, fingerprint=checkpoint.fingerprint, loader=loader)


def _corrections(job: SelectionJob, choices: Mapping[int, Choice], epsilon: float | None) -> Iterator[str]:
    """Yield how the cut of keys and that of values are corrected."""
    family, config, width = job.checkpoint.family, job.checkpoint.config, job.checkpoint.mixers[0].axis.width
    if job.value_dim is None or job.request.keep < width:
        rotated = job.selector.rotates
        yield family.correction(config).describe(width, job.request.keep, job.corrected, rotated, epsilon)
    if job.value_dim is not None:
        yield family.describe_value_correction(config, job.value_dim)
        if losses := Cutter(job.checkpoint.mixers, choices, read=job.checkpoint.read).bottleneck_losses():
            share = f"{sum(losses) / len(losses):.2%} of their squared weights on average, at most {max(losses):.2%}"
            yield f"the bottlenecks of the gates lose {share}"


def is_layerwise(needs: Needs, calibration: Calibration) -> bool:
    """Return whether the channels of a layer can be chosen, by these needs, while a reconstruction is at that layer."""
    at_once = BACKWARD & needs or calibration.evidence is not None or calibration.rrqr_rows is not None
    return bool(needs - {"weight"}) and not at_once


def check_epsilon(checkpoint: Checkpoint, key_dim: int, value_dim: int | None, corrected: bool) -> float | None:
    """Return the norm epsilon of a corrected cut; refuse one so large that it changes the other norms."""
    family, config = checkpoint.family, checkpoint.config
    name = family.correction(config).epsilon if corrected else None
    if name is None and value_dim is not None:
        name = family.value_epsilon(config)
    if name is None:
        return None
    resized = family.resize(config, key_dim, value_dim, corrected=corrected)
    before, after = (float(family.with_defaults(each)[name]) for each in (config, resized))
    if after > MAX_EPSILON:
        purpose = "the query scale" if value_dim is None else "the query scale and the norm over fewer values"
        advice = ", or leave it as it is with `keep_norm_eps`" if value_dim is None else ""
        raise PlanError(
            f"{name} {before:g} would become {after:.2g} to correct {purpose}, and all norms share it:"
            f" it must be at most {MAX_EPSILON:g}; keep more channels{advice}"
        )
    return after


def check_rotatable(checkpoint: Checkpoint, selector: Selector) -> None:
    """Refuse a method that rotates channels for a model whose channels cannot be rotated."""
    if selector.rotates and any(mixer.noncommuting is None for mixer in checkpoint.mixers):
        problem = f"rotates channels, and those of {checkpoint.family.model_type} cannot be rotated"
        raise PlanError(f"{selector.name} {problem}; use one of {', '.join(channel_methods())}")
    if selector.rotates and checkpoint.quantised:
        raise PlanError(f"{selector.name} rotates channels, and quantised weights cannot be: cut the unquantised model")


def cases(
    read_rows: Callable[[Mixer, Slot], Tensor], mixers: Iterable[Mixer], needs: Needs,
    evidence: Mapping[int, Evidence], *, of_values: bool = False,
) -> Iterator[Case]:  # fmt: skip
    """Yield the input of a selector of keys, or of values, for each mixer; `read_rows` returns weights by channel."""
    for mixer in mixers:
        axis = mixer.value_axis if of_values else mixer.axis
        assert axis is not None
        slots = {"query_weight": mixer.query, "key_weight": mixer.key}
        if isinstance(axis, ValueAxis):
            slots = {"value_weight": axis.value, "output_weight": axis.output}
        weights = {name: read_rows(mixer, slot) for name, slot in slots.items() if "weight" in needs}
        yield Case(heads=axis.heads, width=axis.width, evidence=evidence.get(mixer.layer), **weights)


def certify(selection: Choice, evidence: Evidence | None) -> Choice:
    """Return the selection with the condition number of the keys before and after, where their Gram matrix is known."""
    if evidence is None or evidence.key_gram is None:
        return selection
    gram = evidence.key_gram if selection.origins is None else evidence.key_gram[selection.origins]
    claims = {
        "condition_before": plain(gram_condition_number(gram)),
        "condition_after": plain(gram_condition_number(_gram_after(gram, selection))),
    }
    return replace(selection, certificate={**selection.certificate, **claims})


def _gram_after(gram: Tensor, choice: Choice) -> Tensor:
    """Return the Gram matrix of the channels that stay."""
    if isinstance(choice, Basis):
        rotation = choice.rows.to(gram)
        return rotation @ gram @ rotation.mT
    heads = torch.arange(len(gram))[:, None, None]
    return gram[heads, choice.keep[:, :, None], choice.keep[:, None, :]]


def read_plan(path: Path, checkpoint: Checkpoint, *, same_model: bool = False) -> Plan:
    """Read a plan from a file or folder; refuse another model's, unless `same_model` takes that for this one."""
    plan = read_plan_file(path)
    if (other := plan.model.fingerprint) != checkpoint.fingerprint:
        source = quoted(plan.model.source)
        if not same_model:
            raise PlanError(
                f"{quoted(path)} is a plan for another model: {source}, {str(other)[:19]}…; if that is this model in"
                " another precision, use `same_model`"
            )
        plan = replace(plan, model=source_model(checkpoint), origin=plan.model)
    if plan.model_type != checkpoint.family.model_type:
        types = f"{quoted(plan.model_type)}, the model is a {checkpoint.family.model_type}"
        raise PlanError(f"{quoted(path)} is a plan for a {types}: use the plan of this model")
    check_epsilon(checkpoint, plan.key_dim, plan.value_dim, plan.corrected)
    layers = {mixer.layer for mixer in checkpoint.mixers}
    if plan.selections.keys() != layers:
        covered = quoted(sorted(plan.selections))
        raise PlanError(f"{quoted(path)} covers layers {covered}, the model has {quoted(sorted(layers))}")
    for mixer in checkpoint.mixers:
        choice = plan.selections[mixer.layer]
        check_choice(mixer, choice)
        if (choice.key_dim, mixer.axis.width) != (plan.key_dim, plan.width):
            raise PlanError(
                f"{quoted(path)} says key dim {plan.key_dim} of {plan.width}, and keeps {choice.key_dim} of the"
                f" {mixer.axis.width} channels of layer {mixer.layer}"
            )
        if choice.value_dim != plan.value_dim or plan.value_width not in (None, mixer.value_dim):
            dims = f"{choice.value_dim or 'all'} of the {mixer.value_dim}"
            raise PlanError(
                f"{quoted(path)} says value dim {plan.value_dim} of {plan.value_width}, and keeps {dims} values of"
                f" layer {mixer.layer}"
            )
    return plan
