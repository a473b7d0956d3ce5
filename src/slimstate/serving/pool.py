"""How many sequences fit before and after a cut, from what engines allocate and not from the bytes of a state alone.

vLLM has one pool of blocks for everything. A block is a page for every layer of a group, a page has the size of a state
with its convolution, and softmax attention gets so many tokens a page that they fill one. SGLang divides its memory
beforehand: slots for states, and tokens for softmax attention. docs/serving/pool.md derives it, with its sources.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from slimstate.checkpoints.reader import open_headers, read_config
from slimstate.core.state_dtype import SERVED, TYPES
from slimstate.families import family_of
from slimstate.families.contract import Caches, Config
from slimstate.records.pool import Pages, PoolRecord, PoolRow, Share
from slimstate.system.errors import ModelError, PlanError
from slimstate.system.paths import expand_home

GIB = 2**30
ALIGNED = 16  # tokens: blocks of vLLM's attention kernels are multiples of it
MODEL_BYTES = 2  # of a number in bfloat16, which convolutions and weights are in
KV_BYTES = {"bfloat16": 2, "fp8": 1}
ALIKE = 1.5  # groups of vLLM are as large as the larger kind of layer where that is less than so many times the other
STATES_TO_TOKENS = 0.9  # memory for states over that for tokens in SGLang
SLOTS_WITH_PREFIXES = 5  # states of a request in SGLang with prefix caching: 3, and 2 to write while the next is read


@dataclass(frozen=True, kw_only=True)
class PoolOptions:
    """The memory left for caches on each GPU, the tokens of a sequence, and how an engine is started.

    `state_dtype` None is what the engine takes by itself.
    """

    memory_gb: float
    context: int
    prefix_caching: bool = False
    tensor_parallel: int = 1
    state_dtype: str | None = None
    kv_dtype: str = "bfloat16"
    speculative_tokens: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.memory_gb < math.inf or min(self.context, self.tensor_parallel) < 1:
            raise PlanError("`memory_gb`, `context` and `tensor_parallel` must be more than nothing")
        if self.state_dtype not in (None, *SERVED):
            raise PlanError(f"unknown `state_dtype` {self.state_dtype!r}; engines have {', '.join(SERVED)}")
        if self.kv_dtype not in KV_BYTES:
            raise PlanError(f"unknown `kv_dtype` {self.kv_dtype!r}; there are {', '.join(KV_BYTES)}")
        if self.speculative_tokens < 0:
            raise PlanError(f"`speculative_tokens` {self.speculative_tokens}: it must be 0 or more")

    @property
    def memory(self) -> int:
        return int(self.memory_gb * GIB)


def pool(model: str | Path, engine: str, options: PoolOptions, key_dims: tuple[int, ...] = ()) -> PoolRecord:
    """What fits at a model's own key dim and at narrower ones; a config.json alone is enough."""
    config = config_of(str(model))
    family = family_of(config)
    caches = family.caches(config)
    if engine not in ENGINES:
        raise PlanError(f"the pool of {engine!r} is not known; there are {', '.join(ENGINES)}")
    if caches is None:
        raise ModelError(f"{family.model_type} is in neither vLLM nor SGLang: there is no pool to count")
    check_shards(caches, options)
    width, kept_in = caches.sizes.width, options.state_dtype or DEFAULTS[engine](caches)
    rows = [ENGINES[engine](caches, options, kept_in, key_dim) for key_dim in (width, *key_dims)]
    return PoolRecord(
        model=str(model),
        model_type=family.model_type,
        engine=engine,
        memory_bytes=options.memory,
        context=options.context,
        prefix_caching=options.prefix_caching,
        tensor_parallel=options.tensor_parallel,
        state_dtype=kept_in,
        kv_dtype=options.kv_dtype,
        speculative_tokens=options.speculative_tokens,
        linear_layers=caches.linear_layers,
        softmax_layers=caches.softmax_layers,
        key_dim=width,
        rows=tuple(_against(row, rows[0]) for row in rows),
    )


def config_of(model: str) -> Config:
    """Of a config file, of a folder that may hold nothing else, or of a hub repository."""
    place = expand_home(model)
    if place.is_file():
        return read_config(place)
    if (place / "config.json").is_file():
        return read_config(place / "config.json")
    return open_headers(model).config


def check_shards(caches: Caches, options: PoolOptions) -> None:
    """Engines split heads and refuse what does not come out even."""
    shards, sizes = options.tensor_parallel, caches.sizes
    if sizes.value_heads % shards or (sizes.heads % shards and not caches.repeated_keys):
        raise PlanError(
            f"`tensor_parallel` {shards} does not divide {sizes.heads} key heads and {sizes.value_heads} value heads"
        )


def _against(row: PoolRow, uncut: PoolRow) -> PoolRow:
    return replace(row, gain=row.sequences / uncut.sequences if uncut.sequences else None)


def pages_of(caches: Caches, options: PoolOptions, kept_in: str, key_dim: int) -> Pages:
    """What a layer keeps on one GPU, without regard to blocks."""
    shards, sizes = options.tensor_parallel, caches.sizes
    # with fewer groups than GPUs each has a copy of its own, and vLLM counts the groups up to the GPUs
    heads = sizes.heads if sizes.heads % shards == 0 else shards
    filtered = (2 * heads * key_dim + sizes.values) // shards
    kept = caches.taps - 1 + options.speculative_tokens
    return Pages(
        state=sizes.values * key_dim // shards * TYPES[kept_in].itemsize,
        convolution=filtered * kept * MODEL_BYTES,
        token=2 * max(1, caches.kv_heads // shards) * caches.kv_dim * KV_BYTES[options.kv_dtype],
    )


def vllm_pool(caches: Caches, options: PoolOptions, kept_in: str, key_dim: int) -> PoolRow:
    """One pool of blocks, from which groups of layers take theirs."""
    pages = pages_of(caches, options, kept_in, key_dim)
    own = pages.state + pages.convolution
    linear, softmax = caches.linear_layers, caches.softmax_layers
    states = (2 + caches.state_on_the_way if options.prefix_caching else 1) + options.speculative_tokens
    if not softmax:
        size = linear * own
        return PoolRow(
            key_dim=key_dim,
            pages=replace(pages, page=own),
            share=Share(states=states * size, attention=0),
            sequences=options.memory // size / states,
        )
    block = ALIGNED * math.ceil(own / (ALIGNED * pages.token))
    pages = replace(pages, block=block, page=block * pages.token)
    group = group_size(linear, softmax)
    size = group * block * pages.token
    linear_groups, softmax_groups = math.ceil(linear / group), math.ceil(softmax / group)
    blocks, spans = options.memory // size, math.ceil(options.context / block)
    taken = linear_groups * states + softmax_groups * spans
    return PoolRow(
        key_dim=key_dim,
        pages=pages,
        share=Share(states=linear_groups * states * size, attention=softmax_groups * spans * size),
        sequences=blocks / taken,
        cached=blocks / ((linear_groups + softmax_groups) * spans) if options.prefix_caching else None,
    )


def group_size(linear: int, softmax: int) -> int:
    """Layers of a group: as many as the rarer kind has, or as the other where that is hardly more."""
    fewer, more = sorted((linear, softmax))
    return more if more < ALIKE * fewer else fewer


def sglang_pool(caches: Caches, options: PoolOptions, kept_in: str, key_dim: int) -> PoolRow:
    """Slots for states and memory for tokens, divided when the engine starts."""
    if options.speculative_tokens:
        raise PlanError("`speculative_tokens`: the pool of SGLang is counted without them")
    pages = pages_of(caches, options, kept_in, key_dim)
    slot = caches.linear_layers * (pages.state + pages.convolution)
    token = caches.softmax_layers * pages.token
    part = STATES_TO_TOKENS / (1 + STATES_TO_TOKENS)
    slots = max(0, int((options.memory * part - slot) // slot))
    each = SLOTS_WITH_PREFIXES if options.prefix_caching else 1
    running = slots // each
    tokens = (options.memory - (slots + 1) * slot) // token if token else None
    by_tokens = running if tokens is None else tokens // options.context
    return PoolRow(
        key_dim=key_dim,
        pages=pages,
        share=Share(states=each * slot, attention=token * options.context),
        sequences=float(min(running, by_tokens)),
        limit="states" if running < by_tokens else "tokens",
    )


ENGINES = {"vllm": vllm_pool, "sglang": sglang_pool}
# without a word in the config vLLM keeps states in the type of the model, and SGLang in float32
DEFAULTS = {
    "vllm": lambda caches: caches.state_dtype or "bfloat16",
    "sglang": lambda caches: caches.state_dtype or "float32",
}
