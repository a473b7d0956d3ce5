"""Which channels every mixer keeps, from the evidence: ends in a `Plan`, or begins with one that was written before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from slimstate.checkpoints.reader import Checkpoint
from slimstate.core.effective_rank import gram_condition_number
from slimstate.core.evidence import Evidence, EvidenceFile, Need
from slimstate.core.layout import Mixer
from slimstate.core.plan import MOST_OF_A_PLAN, PLAN, Basis, Choice, Plan
from slimstate.core.surgery import check_choice
from slimstate.families import loader_of
from slimstate.families.contract import LARGEST_EPSILON
from slimstate.records.base import versions
from slimstate.records.plan import PlanRecord
from slimstate.records.schema import Misfit
from slimstate.selectors import Case, Method, Request, channel_methods, choose, selector_named
from slimstate.system import threads
from slimstate.system.errors import PlanError, quoted
from slimstate.system.json_files import JsonObject, plain, read_json
from slimstate.system.progress import SILENT, Reporter


def choose_channels(
    checkpoint: Checkpoint,
    method: Method,
    request: Request,
    gathered: EvidenceFile | None = None,
    *,
    corrected: bool = True,
    reporter: Reporter = SILENT,
) -> Plan:
    """The channels every mixer keeps, with all it takes to repeat and to judge the choice."""
    selector = selector_named(method)
    check_rotatable(checkpoint, method)
    evidence = {} if gathered is None else gathered.evidence
    mixers = checkpoint.mixers
    tracked = reporter.track(cases(checkpoint, mixers, selector.needs, evidence), "choosing", len(mixers))
    selections = choose(method, tracked, request)
    layers = [mixer.layer for mixer in mixers]
    with threads.pool_of_all_cores() as pool:  # an eigenvalue problem for every head
        certified = pool.map(certify, selections, map(evidence.get, layers))
        chosen = dict(zip(layers, certified, strict=True))
    calibration = None if gathered is None else dict(gathered.calibration)
    return plan_of(checkpoint, method, request, chosen, calibration, corrected=corrected, reporter=reporter)


def plan_of(
    checkpoint: Checkpoint,
    method: Method,
    request: Request,
    chosen: Mapping[int, Choice],
    calibration: JsonObject | None,
    *,
    corrected: bool = True,
    reporter: Reporter = SILENT,
) -> Plan:
    """What was chosen for every layer, with all it takes to repeat and to judge it."""
    selector = selector_named(method)
    with reporter.waiting("reading the weights for their fingerprint"):
        fingerprint = checkpoint.fingerprint
    correction, width = checkpoint.family.correction(checkpoint.config), checkpoint.mixers[0].axis.width
    corrected = corrected and correction.possible
    epsilon = check_epsilon(checkpoint, request.keep, corrected)
    return Plan(
        model_type=checkpoint.family.model_type,
        width=width,
        key_dim=request.keep,
        method=selector.name,
        score=request.score,
        seed=request.seed,
        corrected=corrected,
        options={name: getattr(request, name) for name in selector.options},
        model={
            "source": checkpoint.source,
            "fingerprint": fingerprint,
            "loader": loader_of(checkpoint.family.model_type).to_json(),
        },
        calibration=calibration,
        versions=versions(),
        selections=chosen,
        parent=checkpoint.plan,
        correction=correction.describe(width, request.keep, corrected, rotated=selector.rotates, epsilon=epsilon),
    )


def check_epsilon(checkpoint: Checkpoint, key_dim: int, corrected: bool) -> float | None:
    """The norm epsilon of a corrected cut; refused where it is so large that the other norms would feel it."""
    before = checkpoint.family.epsilon(checkpoint.config) if corrected else None
    if before is None:
        return None
    after = before * checkpoint.mixers[0].axis.width / key_dim
    if after > LARGEST_EPSILON:
        field = checkpoint.family.correction(checkpoint.config).epsilon
        raise PlanError(
            f"{field} {before:g} would become {after:.2g} to make up for the query scale, and all norms share it:"
            f" above {LARGEST_EPSILON:g} that is felt; keep more channels, or leave it as it is with `corrected`"
        )
    return after


def check_rotatable(checkpoint: Checkpoint, method: Method) -> None:
    """Refuse a rotation of a model whose channels cannot be rotated, before the work that would be lost."""
    selector = selector_named(method)
    if selector.rotates and any(mixer.noncommuting is None for mixer in checkpoint.mixers):
        those = f"those of {checkpoint.family.model_type} cannot be"
        raise PlanError(
            f"{selector.name} rotates the channels, which {those}; use one of {', '.join(channel_methods())}"
        )


def cases(
    checkpoint: Checkpoint, mixers: Iterable[Mixer], needs: frozenset[Need], evidence: Mapping[int, Evidence]
) -> Iterator[Case]:
    """What a selector gets to see of these mixers."""
    for mixer in mixers:
        weights = (
            [checkpoint.read_rows(mixer, slot) for slot in (mixer.query, mixer.key)]
            if "weight" in needs
            else [None, None]
        )
        yield Case(
            heads=mixer.axis.heads,
            width=mixer.axis.width,
            query_weight=weights[0],
            key_weight=weights[1],
            evidence=evidence.get(mixer.layer),
        )


def certify(selection: Choice, evidence: Evidence | None) -> Choice:
    """With the condition number of the keys before and after, where their Gram matrix is known."""
    if evidence is None or evidence.key_gram is None:
        return selection
    claims = {
        "condition_before": plain(gram_condition_number(evidence.key_gram)),
        "condition_after": plain(gram_condition_number(_kept(evidence.key_gram, selection))),
    }
    return replace(selection, certificate={**selection.certificate, **claims})


def _kept(gram: Tensor, choice: Choice) -> Tensor:
    """The Gram matrix of what is kept."""
    if isinstance(choice, Basis):
        rotation = choice.rows.to(gram)
        return rotation @ gram @ rotation.mT
    keep = choice.keep
    rows = gram.gather(1, keep.unsqueeze(2).expand(-1, -1, gram.shape[2]))
    return rows.gather(2, keep.unsqueeze(1).expand(-1, keep.shape[1], -1))


def read_plan(path: Path, checkpoint: Checkpoint) -> Plan:
    """A plan from a file or from the folder of a cut model; it must be for this very model."""
    path = path / PLAN if path.is_dir() else path
    try:
        plan = PlanRecord.from_json(read_json(path, PlanError, MOST_OF_A_PLAN)).plan
    except Misfit as error:
        raise PlanError(f"{quoted(path)} is not a slimstate plan: {error}") from error
    if (other := plan.model.get("fingerprint")) != checkpoint.fingerprint:
        source = quoted(plan.model["source"])
        raise PlanError(f"{quoted(path)} is a plan for another model: {source}, {str(other)[:19]}…")
    if plan.model_type != checkpoint.family.model_type:
        raise PlanError(f"{quoted(path)} is a plan for a {quoted(plan.model_type)}: this is another")
    check_epsilon(checkpoint, plan.key_dim, plan.corrected)
    layers = {mixer.layer for mixer in checkpoint.mixers}
    if plan.selections.keys() != layers:
        covered = quoted(sorted(plan.selections))
        raise PlanError(f"{quoted(path)} covers layers {covered}, the model has {quoted(sorted(layers))}")
    for mixer in checkpoint.mixers:
        choice = plan.selections[mixer.layer]
        check_choice(mixer, choice)
        if (choice.kept, mixer.axis.width) != (plan.key_dim, plan.width):
            raise PlanError(
                f"{quoted(path)} says key dim {plan.key_dim} of {plan.width}, and keeps {choice.kept} of the"
                f" {mixer.axis.width} channels of layer {mixer.layer}"
            )
    return plan
