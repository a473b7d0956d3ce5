"""A recurrence C tokens at a time: matrix products within a chunk, a state between chunks, and the gradient of both.

B batch, T time, H heads, N chunks, K key dim, V value dim. q, k, erase [B, T, H, K]; v [B, T, H, V]; beta [B, T, H];
g [B, T, H] or [B, T, H, K], the logarithm of the decay; state [B, H, K, V].

    S_t = e^{g_t} S_{t-1} + k_t u_t',   u_t = v_t,  or beta_t (v_t - what `erase`, or k_t, finds in the state)

With what the decays make of a chunk (`head_decay`, `channel_decay`), the readers Q and P of its first state S_0, the
scores among its tokens and the keys as they are left at its end, it is

    (I + beta A) u = beta (v - P S_0),   o = Q S_0 + scores u,   S_1 = fade S_0 + keys' u

The backward pass makes everything inside a chunk anew. What is kept for it are the inputs, the states between the
chunks, and where something is erased the updates u and the inverse of I + beta A: memory is linear in the length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from slimstate.kernels.channel_decay import ChannelDecay
from slimstate.kernels.chunks import chunk_views, in_chunks, inverse_of_unit_lower, product, put_in_time
from slimstate.kernels.head_decay import DecayedGradient, HeadDecay
from slimstate.system.threads import parallel_map

# tokens of a chunk: longer ones take more inside of them, shorter ones more of the state between them; the more so
# where channels decay by themselves
CHUNK, CHUNK_BY_CHANNEL = 64, 32
# tokens times channels of a part, below which threads wait for each other longer than they compute
WORTH_A_THREAD = 65536
# how many groups of chunks a gradient is made in, and tokens times channels of a group that is not made smaller
GROUPS, SMALL_GROUP = 4, 32768
# where the heads are in q, k, v, g, beta, erase, bonus and the state
HEAD_AXES = (2, 2, 2, 2, 2, 2, 0, 1)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Which recurrence it is."""

    # the factor of the queries
    scale: float = 1.0
    # whether the queries read the state after their own token, and not the one before it
    late: bool = True
    # whether `erase` looks into the state before the decay of its own token
    early_erase: bool = False
    # C, the tokens of a chunk; None is what is fast for the widths at hand
    chunk: int | None = None


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The tensors of a recurrence by token; those that it does not have are None."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None = None
    beta: Tensor | None = None
    erase: Tensor | None = None
    # how much of the writing of their own token the queries see besides the state before it [H, K]
    bonus: Tensor | None = None


def chunk_scan(inputs: Inputs, state: Tensor | None, rule: Rule) -> tuple[Tensor, Tensor]:
    """The outputs [B, T, H, V] and the last state of a recurrence."""
    if state is None:
        shape = inputs.v.shape
        state = inputs.v.new_zeros(shape[0], shape[2], inputs.k.shape[-1], shape[3])
    given = (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, inputs.erase, inputs.bonus, state)
    o, last = _ChunkScan.apply(rule, *given)  # type: ignore[no-untyped-call]
    return o, last


Given = tuple[Tensor | None, ...]
T = TypeVar("T")


class _ChunkScan(torch.autograd.Function):
    """On a CPU the heads are shared out among threads: nothing goes from one to another."""

    @staticmethod
    def forward(ctx: Any, rule: Rule, *given: Tensor | None) -> tuple[Tensor, Tensor]:
        v, parts = given[2], _parts(given)
        assert v is not None
        o = torch.empty(v.shape, dtype=v.dtype, device=v.device)

        def work(number: int) -> tuple[Tensor, tuple[Tensor, ...]]:
            own = _heads(o, 2, number, parts)
            inputs = _heads_of_all(given, number, parts)
            return _Chunks(rule, inputs, chunk=_chunk_of(rule, inputs)).forward(own)

        found = _done(work, parts, v.device)
        ctx.rule, ctx.parts, ctx.kept = rule, parts, len(found[0][1])
        ctx.save_for_backward(*given, *(tensor for _, kept in found for tensor in kept))
        lasts = [last for last, _ in found]
        return o, lasts[0] if parts == 1 else torch.cat(lasts, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_output: Tensor, by_last: Tensor) -> tuple[Any, ...]:
        count = len(HEAD_AXES)
        given, kept, each = ctx.saved_tensors[:count], ctx.saved_tensors[count:], ctx.kept
        found = [None if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in given]

        def work(number: int) -> None:
            own = _heads_of_all(given, number, ctx.parts)
            by = _heads(by_output, 2, number, ctx.parts), _heads(by_last, 1, number, ctx.parts)
            mine = kept[number * each : (number + 1) * each]
            _backward_in_groups(ctx.rule, own, mine, by, _heads_of_all(found, number, ctx.parts))

        _done(work, ctx.parts, by_output.device)
        return None, *found


def _backward_in_groups(rule: Rule, given: Given, kept: Given, by: tuple[Tensor, Tensor], into: Given) -> None:
    """The gradient, some chunks at a time from the end: what is made anew for it is small beside what is kept."""
    chunk = _chunk_of(rule, given)
    output, last = by
    bonus, first = into[6:]
    if bonus is not None:
        bonus.zero_()
    for start, end in reversed(_groups(given, chunk)):
        tokens = slice(start * chunk, end * chunk)
        part, into_part = (
            (*(None if x is None else x[:, tokens] for x in all_[:6]), *all_[6:]) for all_ in (given, into)
        )
        chunks = _Chunks(rule, part, chunk=chunk, keep=True)
        last = chunks.backward(tuple(x[start:end] for x in kept if x is not None), output[:, tokens], last, into_part)
    assert first is not None
    first.copy_(last)


def _chunk_of(rule: Rule, given: Given) -> int:
    """Tokens of a chunk, not many more than there are; where channels decay, a power of 2."""
    q, g = given[0], given[3]
    assert q is not None
    time = q.shape[1]
    if g is not None and g.ndim == q.ndim:
        return min(rule.chunk or CHUNK_BY_CHANNEL, 1 << (time - 1).bit_length())
    return min(rule.chunk or CHUNK, time)


def _groups(given: Given, chunk: int) -> list[tuple[int, int]]:
    """The chunks whose gradient is made at a time, from one to another."""
    q = given[0]
    assert q is not None
    count, each = -(-q.shape[1] // chunk), q[:, :chunk].numel()
    size = max(1, min(max(-(-count // GROUPS), SMALL_GROUP // each), count))
    return [(start, min(start + size, count)) for start in range(0, count, size)]


def _parts(given: Given) -> int:
    """Into how many parts the heads go: one for each core, where the work of each is worth a thread."""
    q, state = given[0], given[-1]
    assert q is not None
    assert state is not None
    if state.device.type != "cpu":
        return 1
    parts = min(state.shape[1], torch.get_num_threads())
    return parts if q.shape[1] * state[:, :, :, 0].numel() >= parts * WORTH_A_THREAD else 1


def _done(work: Callable[[int], T], parts: int, device: torch.device) -> list[T]:
    """On a CPU each part by a thread that computes alone, also where there is but one."""
    with torch.autocast(device.type, enabled=False):
        return parallel_map(work, range(parts)) if device.type == "cpu" else [work(0)]


def _heads(x: Tensor, axis: int, number: int, parts: int) -> Tensor:
    return x.tensor_split(parts, axis)[number]


def _heads_of_all(given: Sequence[Tensor | None], number: int, parts: int) -> Given:
    """The inputs and the state of some heads, as views."""
    axes = zip(given, HEAD_AXES, strict=True)
    return tuple(None if x is None else _heads(x, axis, number, parts) for x, axis in axes)


class _Chunks:
    """The inputs of a recurrence in chunks, and what their decays make of them; `keep`: for a backward pass."""

    def __init__(self, rule: Rule, given: Given, *, chunk: int, keep: bool = False) -> None:
        q, k, v, g, beta, erase, bonus, state = given
        assert q is not None
        assert k is not None
        assert v is not None
        assert state is not None
        self.rule, self.state, self.chunk = rule, state, chunk
        self.v, self.by_keys = self._split(v), erase is None
        keys = self._split(k).flatten(0, 1)
        self.beta = None if beta is None else self._split(beta.unsqueeze(-1))
        readers = self._readers(q, None if beta is None else (k if erase is None else erase))
        self.decay: HeadDecay | ChannelDecay
        if g is not None and g.ndim == k.ndim:
            seen = None if bonus is None else bonus.repeat(len(keys) // len(bonus), 1)
            decay = self._split(g).flatten(0, 1)
            self.decay = ChannelDecay(readers, keys, decay, late=rule.late, bonus=seen, keep=keep)
        else:
            decays = None if g is None else self._split(g.unsqueeze(-1)).flatten(0, 1)
            self.decay = HeadDecay(readers, keys, decays, early=rule.early_erase)

    def _split(self, x: Tensor) -> Tensor:
        return in_chunks(x, self.chunk)

    def _readers(self, q: Tensor, erase: Tensor | None) -> Tensor:
        """[N B H, R, C, K]."""
        views = [chunk_views(x, self.chunk) for x in (q, erase) if x is not None]
        chunks, batch, heads = views[0].shape[:3]
        found = q.new_empty(chunks, batch, heads, len(views), *views[0].shape[3:])
        torch.mul(views[0], self.rule.scale, out=found[:, :, :, 0])
        for place, view in enumerate(views[1:], 1):
            found[:, :, :, place] = view
        return found.flatten(0, 2)

    def _by_chunk(self, x: Tensor) -> Tensor:
        """[N B H, ...] to [N, B H, ...]."""
        return x.unflatten(0, (len(self.v), -1))

    def _fades(self) -> list[Tensor | None]:
        fade = self.decay.decayed.fade
        return [None] * len(self.v) if fade is None else list(self._by_chunk(fade))

    def forward(self, into: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The last state and what a backward pass needs; the outputs are put into a tensor by token."""
        o, last, kept = self._added() if self.beta is None else self._erasing()
        put_in_time(into, o)
        return last.view(self.state.shape), kept

    def _added(self) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        decayed, v = self.decay.decayed, self.v.flatten(0, 1)
        first = self.state.flatten(0, 1)
        states = v.new_empty(len(self.v) + 1, *first.shape)
        states[0] = first
        torch.bmm(decayed.keys.mT, v, out=states[1:].flatten(0, 1))
        carried, *others = states.unbind(0)
        for fade, state in zip(self._fades(), others, strict=True):
            carried = state.add_(carried) if fade is None else state.addcmul_(carried, fade)
        o = torch.bmm(decayed.scores[:, 0], v).baddbmm_(decayed.readers[:, 0], states[:-1].flatten(0, 1))
        return self._by_chunk(o), carried.clone(), (states,)

    def _erasing(self) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        assert self.beta is not None
        decayed, v, first = self.decay.decayed, self.v, self.state.flatten(0, 1)
        beta = self.beta.flatten(0, 1)
        inverse = inverse_of_unit_lower(beta * decayed.scores[:, 1])
        states, update = v.new_empty(len(v) + 1, *first.shape), torch.empty_like(v)
        states[0] = first
        flat = (self._by_chunk(x).unbind(0) for x in (decayed.readers[:, 1], inverse * beta.mT, decayed.keys.mT))
        carried, *later = states.unbind(0)
        chunks = zip(*flat, v.unbind(0), update.unbind(0), later, self._fades(), strict=True)
        for erasers, solved, keys, values, updates, state, fade in chunks:
            torch.bmm(solved, torch.baddbmm(values, erasers, carried, alpha=-1), out=updates)
            state.copy_(carried) if fade is None else torch.mul(carried, fade, out=state)
            carried = state.baddbmm_(keys, updates)
        o = torch.bmm(decayed.scores[:, 0], update.flatten(0, 1))
        o.baddbmm_(decayed.readers[:, 0], states[:-1].flatten(0, 1))
        return self._by_chunk(o), carried.clone(), (states, update, self._by_chunk(inverse))

    def backward(self, kept: tuple[Tensor, ...], by_output: Tensor, by_last: Tensor, into: Given) -> Tensor:
        """The gradient by the first state; the others are put into tensors of their shapes, that by the bonus added."""
        output, last = self._split(by_output).flatten(0, 1), by_last.flatten(0, 1)
        if self.beta is None:
            gradient, (v, beta, first) = self._added_backward(kept[0], output, last)
        else:
            gradient, (v, beta, first) = self._erasing_backward(kept, output, last)
        readers, keys, g, bonus = self.decay.backward(gradient)
        erase = None
        if self.by_keys and self.beta is not None:
            keys = keys + readers[:, 1]
        elif self.beta is not None:
            erase = readers[:, 1]
        found = (readers[:, 0] * self.rule.scale, keys, v, g, beta, erase)
        for whole, x in zip(into[:6], found, strict=True):
            if whole is not None and x is not None:
                put_in_time(whole if whole.ndim == 4 else whole.unsqueeze(-1), self._by_chunk(x))
        if bonus is not None and into[6] is not None:
            # head by head, so that how many there are does not change the order of a sum
            for own, parts in zip(into[6], bonus.unflatten(0, (-1, len(into[6]))).unbind(1), strict=True):
                own.add_(parts.contiguous().sum(0))
        return first.view(self.state.shape)

    def _by_fade(self, states: Tensor, later: Tensor) -> Tensor | None:
        fade = self.decay.decayed.fade
        if fade is None:
            return None
        found = (states * later).sum(-1, keepdim=True)
        return found if fade.shape[1] > 1 else found.sum(1, keepdim=True)

    def _added_backward(
        self, states: Tensor, output: Tensor, last: Tensor
    ) -> tuple[DecayedGradient, tuple[Tensor, Tensor | None, Tensor]]:
        decayed, v = self.decay.decayed, self.v.flatten(0, 1)
        read = self._by_chunk(product(decayed.readers[:, 0].mT, output))
        after = []
        for fade, new in zip(reversed(self._fades()), reversed(read.unbind(0)), strict=True):
            after.append(last)
            last = last + new if fade is None else torch.addcmul(new, last, fade)
        later, states = torch.stack(after[::-1]).flatten(0, 1), states.flatten(0, 1)
        by_v = torch.baddbmm(product(decayed.scores[:, 0].mT, output), decayed.keys, later)
        gradient = DecayedGradient(
            scores=product(output, v.mT).unsqueeze(1),
            readers=product(output, states.mT).unsqueeze(1),
            keys=product(v, later.mT),
            fade=self._by_fade(states, later),
        )
        return gradient, (by_v, None, last)

    def _erasing_backward(
        self, kept: tuple[Tensor, ...], output: Tensor, last: Tensor
    ) -> tuple[DecayedGradient, tuple[Tensor, Tensor | None, Tensor]]:
        assert self.beta is not None
        decayed, (states, update, inverse) = self.decay.decayed, (x.flatten(0, 1) for x in kept)
        read = self._by_chunk(product(decayed.readers[:, 0].mT, output))
        used = self._by_chunk(product(decayed.scores[:, 0].mT, output))
        transposed = inverse.mT.contiguous(), decayed.readers[:, 1].mT.contiguous()
        flat = [self._by_chunk(x).unbind(0) for x in (decayed.keys, *transposed)]
        chunks = list(zip(*flat, read, used, self.beta, self._fades(), strict=True))
        after, solved = [], []
        for keys, inverted, eraser, new, part, beta, fade in reversed(chunks):
            after.append(last)
            # by beta (v - P S_0), the right side of the system
            solved.append(torch.bmm(inverted, torch.baddbmm(part, keys, last)))
            kept_on = new + last if fade is None else torch.addcmul(new, last, fade)
            last = torch.baddbmm(kept_on, eraser, beta * solved[-1], alpha=-1)
        later, right = torch.stack(after[::-1]).flatten(0, 1), torch.stack(solved[::-1]).flatten(0, 1)
        beta = self.beta.flatten(0, 1)
        by_v = beta * right
        both = torch.cat([output, -by_v], 1)
        scores = product(both, update.mT)
        wanted = self.v.flatten(0, 1) - torch.bmm(decayed.readers[:, 1], states)
        wanted = torch.baddbmm(wanted, decayed.scores[:, 1], update, alpha=-1)
        gradient = DecayedGradient(
            scores=scores.unflatten(1, (2, -1)),
            readers=product(both, states.mT).unflatten(1, (2, -1)),
            keys=product(update, later.mT),
            fade=self._by_fade(states, later),
        )
        return gradient, (by_v, (right * wanted).sum(-1, keepdim=True), last)
