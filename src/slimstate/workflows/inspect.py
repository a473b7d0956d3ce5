"""`slimstate inspect`: what the recurrent state of a model costs, and what each key dim would save."""

from dataclasses import replace
from os import PathLike
from typing import Any

from slimstate.families import family_of
from slimstate.pruning.options import LONG_NAMES
from slimstate.pruning.sizes import describe_model, key_dims_worth_choosing, read_headers
from slimstate.records.cut import InspectionRecord
from slimstate.records.serving import PoolRecord
from slimstate.serving.engines import describe_serving
from slimstate.serving.gains import estimate_gains
from slimstate.serving.pool import config_of, count_sequences
from slimstate.serving.widths import speeds_below
from slimstate.workflows.inputs import Inputs, Model, budget_dims
from slimstate.workflows.options import InspectConfig


def inspect(model: Model, config: InspectConfig | None = None, **options: Any) -> InspectionRecord | PoolRecord:
    """Show the recurrent state of a model and the key dims worth choosing. Only config and tensor headers are read.

    Parameters:
        model: A model folder, a hub id or a config.json. In Python also a transformers model in memory.

    Returns:
        A record with `key_dim`, `state_bytes`, `options` (the key dims worth choosing) and more; with an engine and a
        context, a record of what fits into the engine's memory.

    Examples:
        >>> record = slimstate.inspect("demo/model", state_mb=1.0)
        >>> record.budget.key_dim
    """
    config = InspectConfig.merge(config, options)
    with Inputs(False, None, model) as inputs:
        source = inputs.model(model, reads_text=False)
        if config.counts_pool:
            return _pool(source, config)
        headers = read_headers(source)
        first = headers.mixers[0]
        record = describe_model(
            headers, budget=config.budget, context=config.pool.context,
            candidates=budget_dims(headers.config, config.budget, config.engine),
            serving=describe_serving(headers.config, config.engine, key_dims_worth_choosing(first.axis.width)),
            speed=speeds_below(str(headers.config["model_type"]), first),
        )  # fmt: skip
        return replace(record, gains=estimate_gains(headers.config, record, config.budget.dtype))


def _pool(source: str | PathLike[str], config: InspectConfig) -> PoolRecord:
    assert config.engine is not None
    assert config.budget.memory_gb is not None
    model = config_of(str(source))
    width = family_of(model).mixers(model)[0].axis.width
    state_dtype = next((name for name, short in LONG_NAMES.items() if short == config.budget.state_dtype), None)
    return count_sequences(
        str(source), config.engine, config.pool, tuple(key_dims_worth_choosing(width)),
        memory_gb=config.budget.memory_gb, state_dtype=state_dtype,
    )  # fmt: skip
