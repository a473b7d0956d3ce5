"""Where the channels of a model are: slots in parameters, axes of channels, mixers, and the functions they call.

A mixer is one linear-attention layer. Its axis is the key/query channel axis: H heads of D channels (the width),
of which K (the key dim) are kept; its value axis has the channels of the values. A slot says which rows of a parameter
belong to which channel.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from slimstate.system.value import Value


class Slot(Value):
    """Rows of one parameter that belong to the channels of an axis.

    The row of (head h, channel c) is `start + h * head_stride + c`, and again `copy_stride` rows further on for every
    copy. The simplest slot is Slot(parameter="q_proj.weight"): head after head, D rows each. With a `block` of n heads
    it is `start + (h // n) * head_stride + (h % n) * D + c`.
    """

    parameter: str  # the parameter, by its name in the files below the mixer: "k_proj.weight"
    dim: int = 0  # the dimension of the rows: 0 in a weight [rows, inputs], 1 for the columns of an output projection
    start: int = 0  # the first row: 2048 for the keys of an "in_proj_qkv.weight" with rows [q 2048 | k 2048 | v]
    # rows from a head to the next: None is D, for adjacent heads; 768 if each head has its rows
    # [q 128 | k 128 | v 256 | z 256] together
    head_stride: int | None = None
    block: int = 1  # adjacent heads within a stride: 2 if two value heads lie together in the rows of each key head
    copies: int = 1  # how often the pattern is repeated: 2 if two query heads share the channels of a key head
    copy_stride: int = 0  # rows from a copy to the next: D if copies are within a head, H * D if after all heads
    # whether rows act on their own channel only, as the taps of a depthwise convolution "k_conv1d.weight"; other rows
    # compute their channel, and rotate with it
    depthwise: bool = False
    # the power of (remaining / all) channels by which a cut multiplies the remaining rows: 0.5 for queries with only
    # linear maps between them and the state, which absorb the query scale; -0.5 for what follows a norm over values
    scale_power: float = 0.0
    by_head: bool = False  # whether heads and channels are the first two dimensions: the "bonus" [H, D] of RWKV-6

    def rows_in(self, shape: Sequence[int]) -> int:
        """Return the number of rows of a parameter of this shape."""
        return shape[0] * shape[1] if self.by_head else shape[self.dim]


class Axis(Value):
    """H heads of D channels, and every slot of the parameters where they are."""

    heads: int  # H: 16
    width: int  # D, channels of a head before the cut: 128
    slots: tuple[Slot, ...]  # where they are: rows of q_proj.weight, of k_proj.weight, of their convolutions

    def __post_init__(self) -> None:
        if self.heads < 1 or self.width < 1:
            raise ValueError(f"an axis must have heads and channels, got {self.heads} heads of {self.width} channels")
        if not self.slots:
            raise ValueError("an axis must have slots, or nothing would be cut")

    def rows(self, slot: Slot, channels: Tensor) -> Tensor:
        """Return the rows of `slot` for `channels` [H, n], as [copies, H, n]."""
        heads = self._head_rows(slot).view(1, -1, 1)
        copies = torch.arange(slot.copies).view(-1, 1, 1) * slot.copy_stride
        return slot.start + copies + heads + channels.unsqueeze(0)

    def end(self, slot: Slot) -> int:
        """Return the row after the last of `slot`, the least number of rows that its parameter needs."""
        return slot.start + (slot.copies - 1) * slot.copy_stride + int(self._head_rows(slot)[-1]) + self.width

    def _head_rows(self, slot: Slot) -> Tensor:
        """Return the first row of every head, counted from the start of the slot."""
        stride = self.width * slot.block if slot.head_stride is None else slot.head_stride
        heads = torch.arange(self.heads)
        return heads // slot.block * stride + heads % slot.block * self.width

    def all_rows(self, slot: Slot) -> Tensor:
        return self.rows(slot, torch.arange(self.width).expand(self.heads, -1))


class ValueAxis(Axis):
    """The value channels of a mixer: H heads of V channels, normalised after the state and mapped to its output.

    A cut to V' channels makes the mean of squares in a norm over them V / V' times as large. An epsilon that grows
    likewise, and a factor sqrt(V / V') behind the norm, make the output equal to that with the dropped channels zeroed.
    """

    value: Slot  # the rows that compute the values, one of the slots: Slot(parameter="v_proj.weight")
    output: Slot  # the columns of the output projection: Slot(parameter="o_proj.weight", dim=1)
    # pairs of linear maps, one after the other, with as many channels between them as a head has values: a cut replaces
    # each pair by the best of fewer: (("g_a_proj.weight", "g_b_proj.weight"),)
    bottlenecks: tuple[tuple[str, str], ...] = ()
    tied: bool = False  # whether there are always as many values as keys, because the config has one width for both
    # a norm weight [V] that all heads share, which a cut moves into the output projection, since heads keep different
    # channels: "o_norm.weight"; None if there is none, or if each channel of each head has its own in a slot
    norm: str | None = None


class HookPoint(Value):
    """Where the queries and keys of a mixer can be read as they enter the state, after convolution and activation.

    That is the call of a function, the operator, with queries and keys [B, T, H, D], or with a copy of each head for
    every value head.
    """

    module: str  # the module in which the layer looks up its functions: "fla.layers.delta_net"
    # the functions that it calls with queries and keys: ("chunk_delta_rule", "fused_recurrent_delta_rule")
    operators: tuple[str, ...]
    # the updates of the state for each token: as many keys, and queries too in operators whose time axis counts updates
    updates: int = 1
    query: str = "q"  # the argument with the queries: "q", "query", "C"
    key: str = "k"  # the argument with the keys: "k", "key", "B"
    key_like: tuple[str, ...] = ()  # other arguments with the channels of the keys: ("p",), by which Comba erases
    per_token: tuple[str, ...] = ("v", "g", "beta")  # all others with a time axis: values, decays, update strengths
    # the operator for one token without a time axis, if it is another one: "mamba2_selective_state_update"
    step_operator: str | None = None
    # the function that the layer calls with the queries and then with the keys if it normalises them: "sum_norm"
    normaliser: str | None = None
    initial_state: str = "initial_state"  # the argument with the initial state
    # the argument with the initial products of keys [B, H, K, K], if the state has them too: "h_kk_init"; they are
    # returned before the state
    initial_key_state: str | None = None
    final_state: str = "output_final_state"  # the argument that requests the final state
    value_first: bool = False  # whether that state is [B, H, V, K], as in Mamba-2, and not [B, H, K, V]
    scales_queries: bool = True  # whether operators multiply queries by D^-0.5: not those of Mamba-2 and RWKV-6
    returns_pair: bool = True  # whether operators always return (output, state or None): those of Mamba-2 do not
    # other functions of the module that may be compiled for GPUs only: ("causal_conv1d_fn", "causal_conv1d_update")
    gpu_kernels: tuple[str, ...] = ()
    # functions that compute a whole layer and ignore adapters of its linear maps, never called while slimstate runs
    # a model: ("mamba2_split_conv1d_scan_combined",)
    fused_layers: tuple[str, ...] = ()
    recomputed: bool = False  # whether training on a GPU computes a layer again, because much of it is in float32
    cache: str = "past_key_values"  # the name of the cache, as an argument and in the output: "cache_params"

    @property
    def every_operator(self) -> tuple[str, ...]:
        return self.operators if self.step_operator is None else (*self.operators, self.step_operator)

    @property
    def initial_states(self) -> tuple[str, ...]:
        """The arguments with the initial states, in the order in which the final ones are returned."""
        return (*filter(None, (self.initial_key_state,)), self.initial_state)


class Mixer(Value):
    """One linear-attention layer: its channel axis, its query and key projections, and the shape of its state."""

    layer: int  # the number of the layer in the model: 0
    path: str  # its path in the running model: "model.layers.0.attn"
    axis: Axis  # its key heads, their channels, and every slot that a cut of them changes
    query: Slot  # the rows that compute the queries, one of the slots: Slot(parameter="q_proj.weight")
    key: Slot  # the rows that compute the keys: Slot(parameter="k_proj.weight")
    hook: HookPoint  # the functions in which queries and keys can be read
    input_size: int  # inputs of the projections, the hidden size: 2048
    value_heads: int  # heads of the state, a multiple of the key heads: 32
    value_dim: int  # V, values of a head: the state of a head is K x V
    features: int = 1  # numbers that a feature map makes of each key channel, each a row of the state: 2 for hedgehog
    value_axis: ValueAxis | None = None  # the values, and all slots that their cut changes; None if they cannot be cut
    # the rows with one number for each value head, such as update strengths and decays, as an axis of one channel;
    # None if a head cannot be made from another: Axis(heads=32, width=1, slots=(Slot(parameter="b_proj.weight"),))
    scalars: Axis | None = None
    # its convolutions by what they filter, each with an axis of one slot, to look at and to train:
    # (("query", Axis(heads=16, width=128, slots=(Slot(parameter="q_conv1d.weight"),))), ...)
    filters: tuple[tuple[str, Axis], ...] = ()
    projections: tuple[str, ...] = ()  # the names of all its linear maps, for adapters: ("q_proj", ..., "o_proj")
    # what lies between the projections and the state and does not commute with a rotation of the channels:
    # ("the activation silu",). () if there is nothing, so that a rotated cut is exact; None if the channels cannot be
    # rotated at all, because each has its own gate
    noncommuting: tuple[str, ...] | None = None
    sharing: str | None = None  # which channels share a filter by training: those of a "head", "all" of them, or None
    stored_path: str | None = None  # its path in the files, if another: "model.language_model.layers.0.linear_attn"
    # parameters that the running model joins from parts in the files, along the first dimension:
    # (("conv1d.weight", ("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight")),), or renames, if it is one part
    joined: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @property
    def convolutions(self) -> tuple[str, ...]:
        """The names of the convolution modules of the running model."""
        joined = {part: name for name, parts in self.joined for part in parts}
        parameters = (axis.slots[0].parameter for _, axis in self.filters)
        return tuple(dict.fromkeys(joined.get(name, name).rpartition(".")[0] for name in parameters))

    def value_origins(self, origins: Tensor) -> Tensor:
        """Return the uncut value head that each value head is made from, from those of the key heads [H]."""
        copies = self.value_heads // self.axis.heads
        return (origins.unsqueeze(1) * copies + torch.arange(copies)).flatten()

    def values_beside(self, key_dim: int, value_dim: int | None = None) -> int:
        """Return the values of a head after a cut; None leaves them alone, where they need not be as many as keys."""
        tied = self.value_axis is not None and self.value_axis.tied
        return value_dim or (key_dim if tied else self.value_dim)

    def state_elements(self, key_dim: int, value_dim: int | None = None) -> int:
        """Return the numbers in the state of a sequence after a cut."""
        columns = self.values_beside(key_dim, value_dim) + (0 if self.hook.initial_key_state is None else key_dim)
        return self.value_heads * key_dim * self.features * columns

    @property
    def place_in_files(self) -> str:
        return self.path if self.stored_path is None else self.stored_path

    def name_of(self, slot: Slot) -> str:
        """Return the tensor of a slot in the files."""
        return self.stored_name(slot.parameter)

    def stored_name(self, parameter: str) -> str:
        return f"{self.place_in_files}.{parameter}"

    def running_name_of(self, slot: Slot) -> str:
        """Return the parameter of a slot in the running model, for projections, which are never joined."""
        return self.running_name(slot.parameter)

    def running_name(self, parameter: str) -> str:
        """Return the name in the running model of a parameter that is not joined from several, but may be renamed."""
        renamed = {parts[0]: name for name, parts in self.joined if len(parts) == 1}
        return f"{self.path}.{renamed.get(parameter, parameter)}"

    def stored_parts(self, name: str) -> tuple[str, ...]:
        """Return the tensors in the files that make up a parameter of the running model, if it is of this mixer."""
        if not name.startswith(f"{self.path}."):
            return ()
        parameter = name.removeprefix(f"{self.path}.")
        parts = dict(self.joined).get(parameter, (parameter,))
        return tuple(f"{self.place_in_files}.{part}" for part in parts)

    def by_channel(self, slot: Slot, weight: Tensor) -> Tensor:
        """Return a projection, or its gradient, as [H, D, copies * input size], or of values [H, V, copies * size]."""
        axis = self.axis if self.value_axis is None or slot not in self.value_axis.slots else self.value_axis
        rows = axis.all_rows(slot).permute(1, 2, 0)
        selected = weight.index_select(slot.dim, rows.flatten().to(weight.device)).movedim(slot.dim, 0)
        return selected.reshape(*rows.shape[:2], -1)
