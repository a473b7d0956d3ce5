"""What `inspect` says of an engine's pool: how many sequences fit before and after a cut, with the parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from slimstate.cli.terminal import print_json, printer
from slimstate.system.errors import PlanError

if TYPE_CHECKING:
    from slimstate.records.pool import PoolRecord
    from slimstate.serving.pool import PoolOptions

KIB, MIB = 2**10, 2**20
STATE_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
Engine = Annotated[
    str | None,
    typer.Option(help="What will serve the model: mlx, llama.cpp, vllm, sglang or transformers. Its rules are told."),
]
Context = Annotated[
    int | None,
    typer.Option(help="Tokens of a sequence: how many such fit into --memory-gb on each GPU, before and after a cut."),
]
PrefixCaching = Annotated[bool, typer.Option("--prefix-caching", help="With --context: states are kept to be shared.")]
TensorParallel = Annotated[int, typer.Option(help="With --context: GPUs that share every layer.")]
SpeculativeTokens = Annotated[int, typer.Option(help="With --context: tokens that vLLM drafts at once.")]
KvDtype = Annotated[str, typer.Option(help="With --context: bfloat16 or fp8, for softmax attention.")]
PoolStateDtype = Annotated[
    str | None, typer.Option(help="What the engine keeps states in: fp32 or bf16; by default fp32, in a pool its own.")
]


@dataclass(frozen=True, kw_only=True)
class PoolAsked:
    """The flags about a pool."""

    memory_gb: float | None
    context: int | None
    prefix_caching: bool
    tensor_parallel: int
    state_dtype: str | None
    kv_dtype: str
    speculative_tokens: int

    @property
    def options(self) -> PoolOptions:
        from slimstate.serving.pool import PoolOptions

        if self.memory_gb is None:
            raise PlanError("--context needs --memory-gb: GiB that are left for states and caches on each GPU")
        kept = self.state_dtype and full_name(self.state_dtype)
        return PoolOptions(**{**vars(self), "state_dtype": kept})

    def check_unused(self, sequences: int | None) -> None:
        """Refuse what would do nothing, because no pool is counted."""
        given = {
            "--prefix-caching": self.prefix_caching, "--tensor-parallel": self.tensor_parallel != 1,
            "--speculative-tokens": self.speculative_tokens != 0, "--kv-dtype": self.kv_dtype != "bfloat16",
            "--context with --memory-gb alone": None not in (self.context, self.memory_gb) and sequences is None,
        }  # fmt: skip
        if (flag := next((flag for flag, told in given.items() if told), None)) is not None:
            needed = "give --engine vllm or sglang, --context and --memory-gb"
            raise PlanError(f"{flag} is for the pool of an engine: {needed}")


def full_name(state_dtype: str) -> str:
    """A type of the state as `eval`, `sweep` and engines call it."""
    return STATE_DTYPES.get(state_dtype, state_dtype)


def short_name(state_dtype: str) -> str:
    """The same as a budget calls it."""
    return next((short for short, full in STATE_DTYPES.items() if full == state_dtype), state_dtype)


def show_pool(model: str, engine: str, asked: PoolAsked, as_json: bool) -> None:
    """Every key dim worth choosing, from the config alone."""
    from slimstate.families import family_of
    from slimstate.pruning.budget import key_dims_worth_choosing
    from slimstate.serving.pool import config_of, pool

    options, config = asked.options, config_of(model)
    width = family_of(config).mixers(config)[0].axis.width
    record = pool(model, engine, options, tuple(key_dims_worth_choosing(width)))
    if as_json:
        print_json(record.to_json())
        return
    print_pool(record)


def print_pool(record: PoolRecord) -> None:
    console = printer()
    if not console.is_terminal:
        console.width = 200
    cards = "" if record.tensor_parallel == 1 else f" on each of {record.tensor_parallel} GPUs"
    layers = f"{record.linear_layers} linear and {record.softmax_layers} softmax layers"
    kept = f"states in {record.state_dtype}, keys and values in {record.kv_dtype}"
    console.print(f"{record.model}: {record.model_type}, {layers}", markup=False)
    memory = f"{record.memory_bytes / 2**30:g} GiB for states and caches{cards}"
    prefixes = ", prefix caching" if record.prefix_caching else ""
    console.print(f"{record.engine}: {memory}, sequences of {record.context:,} tokens{prefixes}; {kept}")
    columns = ["key dim", "sequences", "gain", "state KiB", "convolution KiB"]
    blocks, keeps = record.rows[0].pages.block is not None, record.rows[0].kept is not None
    limited = record.rows[0].limit is not None
    columns += ["block, tokens", "page KiB"] * blocks + ["states MiB", "keys and values MiB"]
    table = Table(*columns, *["kept prefixes"] * keeps, *["runs out"] * limited)
    for row in record.rows:
        pages, share = row.pages, row.share
        cells = [str(row.key_dim), f"{row.sequences:,.2f}", "" if row.gain is None else f"{row.gain:.2f}x"]
        cells += [f"{pages.state / KIB:,.0f}", f"{pages.convolution / KIB:,.0f}"]
        cells += [f"{pages.block:,}", f"{(pages.page or 0) / KIB:,.0f}"] if blocks else []
        cells += [f"{share.states / MIB:,.1f}", f"{share.attention / MIB:,.1f}"]
        cells += [f"{row.kept:,.2f}"] if row.kept is not None else []
        table.add_row(*cells, *[row.limit or ""] * limited)
    console.print(table)
    console.print("state, convolution and page are of one layer; states, keys and values of one sequence")
    if keeps:
        console.print("kept prefixes: whole sequences whose states are kept at every block")
