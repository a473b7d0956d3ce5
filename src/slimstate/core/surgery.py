"""Cut parameters by a choice of channels or directions, from slots alone: this module knows no architecture.

A selection deletes the rows of the dropped channels and keeps all other rows in their order. A basis T [K, D] first
rotates the D rows of every head into K: the rows that compute the channels become T rows, and filters, which act on one
channel each, become (T o T) filters, the elementwise square: the best approximation by filters of one channel each, and
the same filter if all channels of a head share one. Queries are scaled by d_k^-0.5, so the remaining rows of a slot
that absorbs the query scale are multiplied by sqrt(key dim / width) in a corrected cut.

A head can be made from another head of the uncut model: all its rows come from there, and where n heads are made from
one, the columns that read their values are divided by n. With all channels that is the uncut model without the heads
that no head is made from.

Value channels are deleted likewise. What follows a norm over V values is multiplied by sqrt(V / V'), and a norm weight
that all heads share moves into the output projection: its columns are multiplied by it, and it becomes ones. Two linear
maps B A with V channels between them become the V' largest singular directions of their product.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from slimstate.core.layout import Axis, Mixer, Slot
from slimstate.core.selection import Basis, Choice, Selection
from slimstate.system.errors import PlanError


class Cutter:
    """Cut every parameter by a choice of channels or directions for each mixer.

    `read` returns a parameter before the cut by its name; a value cut needs it for shared norm weights.
    """

    def __init__(
        self, mixers: Iterable[Mixer], selections: Mapping[int, Choice], *, corrected: bool = True,
        read: Callable[[str], Tensor] | None = None,
    ) -> None:  # fmt: skip
        self._read = read
        self._dropped: dict[str, tuple[Slot, list[Tensor]]] = {}
        self._moves: dict[str, list[Callable[[Tensor], Tensor]]] = {}  # of rows to other heads
        self._rotations: dict[str, list[Callable[[Tensor], Tensor]]] = {}
        self._rescaled: dict[str, list[tuple[Tensor, float]]] = {}
        self._shared_norms: dict[str, int] = {}  # norm weights that become ones, with their size after the cut
        self._folded: dict[str, tuple[str, Tensor]] = {}  # by output projection: its norm weight, channels of columns
        self._bottlenecks: dict[str, tuple[str, str, int]] = {}  # both maps and the channels to keep, by each map
        for mixer in mixers:
            choice = selections[mixer.layer]
            check_choice(mixer, choice)
            for slot, move in head_moves(mixer, choice):
                self._moves.setdefault(mixer.name_of(slot), []).append(move)
            for slot in mixer.axis.slots:
                self._drop(mixer, mixer.axis, slot, remaining_channels(choice), rescaled=corrected)
                if isinstance(choice, Basis):
                    rotate = partial(rotated, mixer.axis, slot, choice)
                    self._rotations.setdefault(mixer.name_of(slot), []).append(rotate)
            if choice.values is not None:
                self._drop_values(mixer, choice.values)

    def _drop(self, mixer: Mixer, axis: Axis, slot: Slot, remaining: Tensor, *, rescaled: bool) -> None:
        name = mixer.name_of(slot)
        _, rows = self._dropped.setdefault(name, (slot, []))
        rows.append(axis.rows(slot, dropped_channels(axis.width, remaining)).flatten())
        if slot.scale_power and rescaled:
            factor = (remaining.shape[1] / axis.width) ** slot.scale_power
            self._rescaled.setdefault(name, []).append((axis.rows(slot, remaining).flatten(), factor))

    def _drop_values(self, mixer: Mixer, values: Tensor) -> None:
        axis = mixer.value_axis
        assert axis is not None  # check_choice
        for slot in axis.slots:
            self._drop(mixer, axis, slot, values, rescaled=True)
        if axis.norm is not None:
            norm = mixer.stored_name(axis.norm)
            self._shared_norms[norm] = values.shape[1]
            columns = axis.all_rows(axis.output)
            channels = torch.empty(columns.numel(), dtype=torch.long)
            channels[columns] = torch.arange(axis.width)
            self._folded[mixer.name_of(axis.output)] = norm, channels
        for pair in axis.bottlenecks:
            names = mixer.stored_name(pair[0]), mixer.stored_name(pair[1])
            self._bottlenecks |= dict.fromkeys(names, (*names, values.shape[1]))

    def touches(self, name: str) -> bool:
        return any(name in places for places in (self._dropped, self._moves, self._shared_norms, self._bottlenecks))

    def shape(self, name: str, shape: Iterable[int]) -> list[int]:
        """Return the shape of parameter `name` after the cut."""
        sizes = list(shape)
        if name in self._shared_norms:
            return [self._shared_norms[name]]
        if name in self._dropped:
            slot, rows = self._dropped[name]
            count = sum(len(part) for part in rows)
            sizes[1 if slot.by_head else slot.dim] -= count // sizes[0] if slot.by_head else count
        if name in self._bottlenecks:
            first, _, rank = self._bottlenecks[name]
            sizes[0 if name == first else 1] = rank
        return sizes

    def remaining_rows(self, name: str, rows: int) -> Tensor:
        """Return which of the rows of parameter `name` remain, ascending; of all its heads where it is by head."""
        mask = torch.ones(rows, dtype=torch.bool)
        mask[torch.cat(self._dropped[name][1])] = False
        return mask.nonzero().flatten()

    def changes_values(self, name: str) -> bool:
        """Return whether parameter `name` is moved, rotated or scaled, too, and not only shortened."""
        changes = (self._moves, self._rotations, self._rescaled, self._folded, self._shared_norms, self._bottlenecks)
        return any(name in places for places in changes)

    def bottleneck_losses(self) -> list[float]:
        """Return the share of the squared weights of every bottleneck, as one map, that the cut loses."""
        return [self._narrowed(*pair)[2] for pair in dict.fromkeys(self._bottlenecks.values())]

    def _narrowed(self, first: str, second: str, rank: int) -> tuple[Tensor, Tensor, float]:
        """Return two maps whose product is the best of this rank of that of `first` and the remaining rows of `second`.

        Also return the share of its squares that is lost.
        """
        before, after = self._read_needed(first).double(), self._read_needed(second).double()
        if second in self._dropped:
            after = after[self.remaining_rows(second, len(after))]
        (left, left_factor), (right, right_factor) = torch.linalg.qr(after), torch.linalg.qr(before.mT)
        u, s, v = torch.linalg.svd(left_factor @ right_factor.mT)
        root = s[:rank].sqrt()
        lost = float(s[rank:].square().sum() / s.square().sum().clamp_min(torch.finfo(s.dtype).tiny))
        return root.unsqueeze(-1) * (v[:rank] @ right.mT), (left @ u[:, :rank]) * root, lost

    def _read_needed(self, name: str) -> Tensor:
        if self._read is None:
            raise ValueError(f"a cut of values needs `read` for {name}")
        return self._read(name)

    def apply(self, name: str, tensor: Tensor) -> Tensor:
        """Return parameter `name`, rotated if its mixer is, without the rows of the dropped channels."""
        if name in self._shared_norms:
            return tensor.new_ones(self._shared_norms[name])
        if name in self._bottlenecks:
            first, second, rank = self._bottlenecks[name]
            before, after, _ = self._narrowed(first, second, rank)
            return (before if name == first else after).to(tensor.device, tensor.dtype)
        tensor = self.rearrange(name, tensor)
        if name not in self._dropped:
            return tensor
        for rotate in self._rotations.get(name, ()):
            tensor = rotate(tensor)
        slot, _ = self._dropped[name]
        dim, shape = slot.dim, self.shape(name, tensor.shape)
        tensor = tensor.flatten(0, 1) if slot.by_head else tensor
        factors = self._factors(name, tensor.shape[dim])
        if factors is not None:
            by_row = factors.to(tensor.device).view(-1, *(1 for _ in range(tensor.ndim - dim - 1)))
            tensor = (tensor.to(torch.promote_types(tensor.dtype, torch.float32)) * by_row).to(tensor.dtype)
        return tensor.index_select(dim, self.remaining_rows(name, tensor.shape[dim]).to(tensor.device)).view(shape)

    def rearranges(self, name: str) -> bool:
        """Return whether parameter `name` has rows of heads that are made from others."""
        return name in self._moves

    def rearrange(self, name: str, tensor: Tensor) -> Tensor:
        """Return parameter `name` with the rows of every head from the one that it is made from."""
        for move in self._moves.get(name, ()):
            tensor = move(tensor)
        return tensor

    def _factors(self, name: str, rows: int) -> Tensor | None:
        """Return the factor of every row in float32, or None if all are one."""
        if name not in self._rescaled and name not in self._folded:
            return None
        factors = torch.ones(rows)
        for places, factor in self._rescaled.get(name, ()):
            factors[places] *= factor
        if name in self._folded:
            norm, channels = self._folded[name]
            factors *= self._read_needed(norm).float().cpu()[channels]
        return factors


def outline(mixers: Sequence[Mixer], key_dim: int, value_dim: int | None = None) -> Cutter:
    """Return a cutter with the shapes of every cut to these dims; they do not depend on the channels."""
    choices: dict[int, Choice] = {}  # the first channels of every head
    for mixer in mixers:
        values, size = None, mixer.values_beside(key_dim, value_dim)
        if size < mixer.value_dim and mixer.value_axis is not None:
            values = torch.arange(size).expand(mixer.value_axis.heads, -1)
        choices[mixer.layer] = Selection(keep=torch.arange(key_dim).expand(mixer.axis.heads, -1), values=values)
    return Cutter(mixers, choices)


def check_choice(mixer: Mixer, choice: Choice) -> None:
    """Check that a choice fits the mixer, and that its channels can be rotated if it rotates them."""
    choice.check(mixer.axis)
    choice.check_values(mixer)
    choice.check_origins(mixer)
    if isinstance(choice, Basis) and mixer.noncommuting is None:
        raise PlanError(f"layer {mixer.layer}: the channels of this architecture cannot be rotated, only chosen")


def head_moves(mixer: Mixer, choice: Choice) -> Iterator[tuple[Slot, Callable[[Tensor], Tensor]]]:
    """Yield every slot with rows of heads that are made from others, and the function that takes them from there."""
    if choice.origins is None:
        return
    assert mixer.value_axis is not None
    assert mixer.scalars is not None  # of a mixer whose heads can be made from others
    values = mixer.value_origins(choice.origins)
    for axis, heads in ((mixer.axis, choice.origins), (mixer.value_axis, values), (mixer.scalars, values)):
        for slot in axis.slots:
            yield slot, partial(_take_rows, axis, slot, heads, shared=slot == mixer.value_axis.output)


def _take_rows(axis: Axis, slot: Slot, heads: Tensor, tensor: Tensor, *, shared: bool) -> Tensor:
    """Return a parameter whose heads have the rows of `heads`; `shared` rows are divided by the number of copies."""
    rows = axis.all_rows(slot)
    result = (tensor.flatten(0, 1) if slot.by_head else tensor).movedim(slot.dim, 0).clone()
    values = result[rows[:, heads].to(tensor.device)]
    if shared:
        counts = torch.bincount(heads)[heads].to(tensor.device).view(1, -1, *(1 for _ in values.shape[2:]))
        values = (values.to(torch.promote_types(values.dtype, torch.float32)) / counts).to(values.dtype)
    result[rows.to(tensor.device)] = values
    return result.movedim(0, slot.dim).contiguous().view_as(tensor)


def rotated(axis: Axis, slot: Slot, basis: Basis, tensor: Tensor) -> Tensor:
    """Return a parameter in the directions of a basis: the first K channels of every head; the others are zero."""
    rows = axis.all_rows(slot).flatten().to(tensor.device)
    rotation = basis.rows.to(tensor.device, torch.float64)
    if slot.depthwise:  # normalised to sum to exactly one, so that a shared filter stays the same bit for bit
        rotation = rotation.square() / rotation.square().sum(-1, keepdim=True)
    moved = (tensor.flatten(0, 1) if slot.by_head else tensor).movedim(slot.dim, 0).clone()
    by_head = moved[rows].double().reshape(slot.copies, axis.heads, axis.width, -1)
    result = torch.zeros_like(by_head)
    result[:, :, : basis.key_dim] = rotation @ by_head
    moved[rows] = result.reshape(len(rows), *moved.shape[1:]).to(tensor.dtype)
    return moved.movedim(0, slot.dim).contiguous().view_as(tensor)


def remaining_channels(choice: Choice) -> Tensor:
    """Return the remaining channels [H, K]: those of a selection, or the first K, where `rotated` puts a basis."""
    if isinstance(choice, Basis):
        return torch.arange(choice.key_dim).expand(choice.rows.shape[0], -1)
    return choice.keep


def dropped_channels(width: int, keep: Tensor) -> Tensor:
    """Return the channels [H, D - K] that are not in `keep` [H, K], ascending."""
    mask = torch.zeros(keep.shape[0], width, dtype=torch.bool).scatter_(1, keep, True)
    return (~mask).nonzero()[:, 1].view(keep.shape[0], width - keep.shape[1])
