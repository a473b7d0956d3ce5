"""Count how many sequences fit before and after a cut, from what engines allocate and not from the state alone.

vLLM has one pool of blocks for everything. A block is a page for every layer of a group, a page has the size of a state
with its convolution, and softmax attention gets as many tokens per page as fill one. SGLang divides its memory
beforehand into slots for states and tokens for softmax attention. docs/serving/pool.md derives both, with sources.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from slimstate.checkpoints.reader import open_headers, read_config
from slimstate.core.state_dtype import TYPES
from slimstate.families import family_of
from slimstate.families.contract import Caches, Config
from slimstate.records.serving import Pages, PoolRecord, PoolRow, Share
from slimstate.serving.engines import ServedModel, warning
from slimstate.serving.options import PoolOptions
from slimstate.system.errors import ModelError, PlanError
from slimstate.system.input_files import expand_home
from slimstate.system.value import Value

GIB = 2**30
BLOCK_MULTIPLE = 16  # tokens: block sizes of vLLM's attention kernels are multiples of it
MODEL_BYTES = 2  # of a number in bfloat16, the type of convolutions and weights
KV_BYTES = {"bfloat16": 2, "fp8": 1}
SAME_GROUP_RATIO = 1.5  # vLLM's groups have the size of the larger kind of layer below this ratio to the smaller
STATES_TO_TOKENS = 0.9  # memory for states over memory for tokens in SGLang
PREFIX_SLOTS = 5  # states of a request in SGLang with prefix caching: 3, and 2 to write while the next is read
STATE_DTYPES = {"vllm": "bfloat16", "sglang": "float32"}  # default where the config of a model has none


def config_of(model: str) -> Config:
    """Return the config of a file, of a folder that may contain nothing else, or of a hub repository."""
    path = expand_home(model)
    for file in (path, path / "config.json"):
        if file.is_file():
            return read_config(file)
    return open_headers(model).config


def count_sequences(
    model: str, engine: str, options: PoolOptions, key_dims: tuple[int, ...] = (), *,
    memory_gb: float, state_dtype: str | None = None,
) -> PoolRecord:  # fmt: skip
    """Return how many sequences fit at a model's own key dim and at narrower ones; a config.json alone is enough.

    The memory, in GiB, is what each GPU has for states and caches; the default state dtype is that of the engine.
    """
    config = config_of(model)
    family = family_of(config)
    caches = family.caches(config)
    if engine not in ENGINES:
        raise PlanError(f"the memory of {engine!r} cannot be counted; `engine` must be {' or '.join(ENGINES)}")
    if caches is None:
        raise ModelError(f"sequences of {family.model_type} cannot be counted: what engines allocate is not known")
    if options.context is None or options.context < 1:
        raise PlanError(f"`context` must be at least 1, got {options.context}")
    pool = Pool(
        caches=caches, options=options, context=options.context, memory=int(memory_gb * GIB),
        state_dtype=state_dtype or caches.state_dtype or STATE_DTYPES[engine],
    )  # fmt: skip
    rows = [ENGINES[engine](pool, key_dim) for key_dim in (caches.sizes.width, *key_dims)]
    uncut = rows[0].sequences
    return PoolRecord(
        model=model,
        model_type=family.model_type,
        engine=engine,
        memory_bytes=pool.memory,
        **{**vars(options), "context": pool.context},
        state_dtype=pool.state_dtype,
        linear_layers=caches.linear_layers,
        softmax_layers=caches.softmax_layers,
        key_dim=caches.sizes.width,
        rows=tuple(replace(row, gain=row.sequences / uncut if uncut else None) for row in rows),
        warning=warning(ServedModel.at_dims(config), engine),
    )


class Pool(Value):
    """The memory of an engine on one GPU, in bytes, and what a model stores in it."""

    caches: Caches
    options: PoolOptions
    context: int
    memory: int
    state_dtype: str

    def __post_init__(self) -> None:
        reason = "has no effect: the model has no softmax attention"
        self.options.refuse(("kv_dtype",), reason, unless=bool(self.caches.softmax_layers))
        shards, sizes = self.options.tensor_parallel, self.caches.sizes
        if sizes.value_heads % shards or (sizes.heads % shards and not self.caches.repeated_keys):
            heads = f"{sizes.heads} key heads and {sizes.value_heads} value heads"
            raise PlanError(f"`tensor_parallel` must divide {heads}, got {shards}")

    def pages(self, key_dim: int) -> Pages:
        """Return what a layer stores on one GPU, without regard to blocks."""
        shards, sizes = self.options.tensor_parallel, self.caches.sizes
        # with fewer groups than GPUs each GPU has a copy, and vLLM counts as many groups as GPUs
        heads = sizes.heads if sizes.heads % shards == 0 else shards
        channels = (2 * heads * key_dim + sizes.values) // shards
        inputs = self.caches.taps - 1 + self.options.speculative_tokens
        kv_heads = max(1, self.caches.kv_heads // shards)
        return Pages(
            state=sizes.values * key_dim // shards * TYPES[self.state_dtype].itemsize,
            convolution=channels * inputs * MODEL_BYTES,
            token=2 * kv_heads * self.caches.kv_dim * KV_BYTES[self.options.kv_dtype],
        )

    def in_vllm(self, key_dim: int) -> PoolRow:
        """Return how many sequences fit into one pool of blocks, which all groups of layers share."""
        pages, options = self.pages(key_dim), self.options
        state = pages.state + pages.convolution
        linear, softmax = self.caches.linear_layers, self.caches.softmax_layers
        states = (2 + self.caches.stores_block_states if options.prefix_caching else 1) + options.speculative_tokens
        if not softmax:
            size = linear * state
            return PoolRow(
                key_dim=key_dim,
                pages=replace(pages, page=state),
                share=Share(states=states * size, attention=0),
                sequences=self.memory // size / states,
            )
        block = BLOCK_MULTIPLE * math.ceil(state / (BLOCK_MULTIPLE * pages.token))
        group = group_size(linear, softmax)
        size = group * block * pages.token
        linear_groups, softmax_groups = math.ceil(linear / group), math.ceil(softmax / group)
        blocks, spans = self.memory // size, math.ceil(self.context / block)
        return PoolRow(
            key_dim=key_dim,
            pages=replace(pages, block=block, page=block * pages.token),
            share=Share(states=linear_groups * states * size, attention=softmax_groups * spans * size),
            sequences=blocks / (linear_groups * states + softmax_groups * spans),
            cached=blocks / ((linear_groups + softmax_groups) * spans) if options.prefix_caching else None,
        )

    def in_sglang(self, key_dim: int) -> PoolRow:
        """Return how many sequences fit into slots for states and memory for tokens, divided when the engine starts."""
        if self.options.speculative_tokens:
            raise PlanError("`speculative_tokens` are not supported for sglang; leave them out")
        pages = self.pages(key_dim)
        slot = self.caches.linear_layers * (pages.state + pages.convolution)
        token = self.caches.softmax_layers * pages.token
        share = STATES_TO_TOKENS / (1 + STATES_TO_TOKENS)
        slots = max(0, int((self.memory * share - slot) // slot))
        slots_each = PREFIX_SLOTS if self.options.prefix_caching else 1
        by_states = slots // slots_each
        by_tokens = (self.memory - (slots + 1) * slot) // token // self.context if token else by_states
        return PoolRow(
            key_dim=key_dim,
            pages=pages,
            share=Share(states=slots_each * slot, attention=token * self.context),
            sequences=float(max(0, min(by_states, by_tokens))),
            limit="states" if not token or by_states < by_tokens else "tokens",
        )


def group_size(linear: int, softmax: int) -> int:
    """Return the layers of a group: the number of the rarer kind, or of the other kind if that is little more."""
    fewer, more = sorted((linear, softmax))
    return more if more < SAME_GROUP_RATIO * fewer else fewer


ENGINES: Mapping[str, Callable[[Pool, int], PoolRow]] = {"vllm": Pool.in_vllm, "sglang": Pool.in_sglang}
