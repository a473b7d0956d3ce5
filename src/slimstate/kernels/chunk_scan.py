"""Compute a recurrence C tokens at a time: matrix products within a chunk, a state between chunks, and the gradient.

B batch, T time, H heads, N chunks, K key dim, V value dim. q, k, erase [B, T, H, K]; v [B, T, H, V]; beta [B, T, H];
g [B, T, H] or [B, T, H, K], the logarithm of the decay; state [B, H, K, V].

    S_t = e^{g_t} S_{t-1} + k_t u_t',   u_t = v_t,  or beta_t (v_t - what `erase`, or k_t, reads from the state)

With the decays of a chunk (`head_decay`, `channel_decay`) applied to the readers Q and P of its first state S_0, the
scores between its tokens and the keys at its end, this is

    (I + beta A) u = beta (v - P S_0),   o = Q S_0 + scores u,   S_1 = fade S_0 + keys' u

The backward pass computes everything inside a chunk again. Saved for it are the inputs, the states between chunks, and
where something is erased the updates u and the inverse of I + beta A: memory is linear in the length.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from slimstate.kernels.channel_decay import ChannelDecay
from slimstate.kernels.chunks import chunk_views, in_chunks, inverse_of_unit_lower, product, write_chunks
from slimstate.kernels.head_decay import Decayed, HeadDecay
from slimstate.system.threads import parallel_map
from slimstate.system.value import Value

# tokens of a chunk: longer chunks cost more inside of them, shorter ones more between them, above all where every
# channel has a decay
CHUNK, CHUNK_BY_CHANNEL = 64, 32
MIN_THREAD_ELEMENTS = 65536  # tokens times channels of a part, below which a thread waits longer than it computes
# groups of chunks that a gradient is computed in, and tokens times channels that a group has at least
GROUPS, MIN_GROUP_ELEMENTS = 4, 32768
# the axis of the heads in each of `Inputs`, of which the first six are by token
HEAD_AXES, BY_TOKEN = (2, 2, 2, 2, 2, 2, 0, 1), 6
T = TypeVar("T")
Outputs = tuple[Tensor, Tensor]  # of all tokens, and the last state; or the gradient of both
Gradients = tuple[Decayed, tuple[Tensor, Tensor | None, Tensor]]  # of what is decayed; of v, beta and the first state


class Rule(Value):
    """The kind of a recurrence."""

    scale: float = 1.0  # the factor of the queries
    late: bool = True  # whether queries read the state after their own token, or the one before it
    early_erase: bool = False  # whether `erase` reads the state before the decay of its own token
    chunk: int | None = None  # C, the tokens of a chunk; None chooses a fast one


class Inputs(NamedTuple):
    """The tensors of a recurrence, or the gradient of each; None for those that it does not have."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None = None
    beta: Tensor | None = None
    erase: Tensor | None = None
    bonus: Tensor | None = None  # the weight of their own token that queries see beside the state before it [H, K]
    state: Tensor | None = None  # the state before the first token; None is zero


def zero_state(k: Tensor, v: Tensor) -> Tensor:
    return v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3])


def chunk_scan(inputs: Inputs, rule: Rule) -> Outputs:
    """Return the outputs [B, T, H, V] and the last state of a recurrence."""
    state = zero_state(inputs.k, inputs.v) if inputs.state is None else inputs.state
    return _ChunkScan.apply(rule, *inputs._replace(state=state))  # type: ignore[no-untyped-call]


class _ChunkScan(torch.autograd.Function):
    """The scan and its gradient; on a CPU the heads, which are independent, are divided between threads."""

    @staticmethod
    def forward(ctx: Any, rule: Rule, *tensors: Any) -> tuple[Tensor, Tensor]:
        v, parts = Inputs(*tensors).v, _parts(Inputs(*tensors))
        o = torch.empty(v.shape, dtype=v.dtype, device=v.device)

        def work(number: int) -> tuple[Tensor, tuple[Tensor, ...]]:
            inputs = _heads_of_all(tensors, number, parts)
            chunks = _Chunks(rule, inputs, chunk=_chunk_of(rule, inputs))
            return chunks.forward(_heads(o, 2, number, parts))

        results = _in_parts(work, parts, v.device)
        ctx.rule, ctx.parts, ctx.count_per_part = rule, parts, len(results[0][1])
        ctx.save_for_backward(*tensors, *(tensor for _, saved in results for tensor in saved))
        lasts = [last for last, _ in results]
        return o, lasts[0] if parts == 1 else torch.cat(lasts, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_output: Tensor, by_last: Tensor) -> tuple[Any, ...]:
        everything, count, each = ctx.saved_tensors, len(HEAD_AXES), ctx.count_per_part  # checkpoints give it once
        tensors, saved = everything[:count], everything[count:]
        gradients = [None if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in tensors]

        def work(number: int) -> None:
            own = _heads_of_all(tensors, number, ctx.parts)
            by = _heads(by_output, 2, number, ctx.parts), _heads(by_last, 1, number, ctx.parts)
            mine = saved[number * each : (number + 1) * each]
            _backward_in_groups(ctx.rule, own, mine, by, _heads_of_all(gradients, number, ctx.parts))

        _in_parts(work, ctx.parts, by_output.device)
        return None, *gradients


def _backward_in_groups(rule: Rule, inputs: Inputs, saved: Sequence[Tensor], by: Outputs, into: Inputs) -> None:
    """Compute the gradient some chunks at a time, from the end, so that what is computed again stays small."""
    chunk = _chunk_of(rule, inputs)
    output, last = by
    if into.bonus is not None:
        into.bonus.zero_()
    for start, end in reversed(_groups(inputs, chunk)):
        tokens = slice(start * chunk, end * chunk)
        part, into_part = (_at_tokens(tensors, tokens) for tensors in (inputs, into))
        chunks = _Chunks(rule, part, chunk=chunk, keep=True)
        last = chunks.backward(tuple(x[start:end] for x in saved), output[:, tokens], last, into_part)
    assert into.state is not None
    into.state.copy_(last)


def _at_tokens(inputs: Inputs, tokens: slice) -> Inputs:
    by_token: Any = (None if x is None else x[:, tokens] for x in inputs[:BY_TOKEN])
    return Inputs(*by_token, *inputs[BY_TOKEN:])


def _chunk_of(rule: Rule, inputs: Inputs) -> int:
    """Return the tokens of a chunk, not many more than there are; a power of 2 where every channel has a decay."""
    time = inputs.q.shape[1]
    if inputs.g is not None and inputs.g.ndim == inputs.q.ndim:
        return min(rule.chunk or CHUNK_BY_CHANNEL, 1 << (time - 1).bit_length())
    return min(rule.chunk or CHUNK, time)


def _groups(inputs: Inputs, chunk: int) -> list[tuple[int, int]]:
    """Return the first and last chunk of every group whose gradient is computed together."""
    count, each = -(-inputs.q.shape[1] // chunk), inputs.q[:, :chunk].numel()
    size = max(1, min(max(-(-count // GROUPS), MIN_GROUP_ELEMENTS // each), count))
    return [(start, min(start + size, count)) for start in range(0, count, size)]


def _parts(inputs: Inputs) -> int:
    """Return the number of parts of the heads: one for each core if there is enough work for a thread."""
    if inputs.k.device.type != "cpu":
        return 1
    parts = min(inputs.k.shape[2], torch.get_num_threads())
    return parts if inputs.k.numel() >= parts * MIN_THREAD_ELEMENTS else 1


def _in_parts(work: Callable[[int], T], parts: int, device: torch.device) -> list[T]:
    """Compute every part, on a CPU in a thread of its own, even if there is only one."""
    with torch.autocast(device.type, enabled=False):
        return parallel_map(work, range(parts)) if device.type == "cpu" else [work(0)]


def _heads(x: Tensor, axis: int, number: int, parts: int) -> Tensor:
    return x.tensor_split(parts, axis)[number]


def _heads_of_all(tensors: Sequence[Any], number: int, parts: int) -> Inputs:
    axes = zip(tensors, HEAD_AXES, strict=True)
    views: Any = (None if x is None else _heads(x, axis, number, parts) for x, axis in axes)
    return Inputs(*views)


class _Chunks:
    """The inputs of a recurrence in chunks, with their decays applied; `keep` what a backward pass needs."""

    def __init__(self, rule: Rule, inputs: Inputs, *, chunk: int, keep: bool = False) -> None:
        q, k, v, g, beta, erase, bonus, state = inputs
        assert state is not None
        self.rule, self.state, self.chunk = rule, state, chunk
        self.v, self.by_keys = in_chunks(v, chunk), erase is None
        keys = in_chunks(k, chunk).flatten(0, 1)
        self.beta = None if beta is None else in_chunks(beta.unsqueeze(-1), chunk)
        readers = self._readers(q, None if beta is None else (k if erase is None else erase))
        self.decay: HeadDecay | ChannelDecay
        if g is not None and g.ndim == k.ndim:
            bonuses = None if bonus is None else bonus.repeat(len(keys) // len(bonus), 1)
            decay = in_chunks(g, chunk).flatten(0, 1)
            self.decay = ChannelDecay(readers, keys, decay, late=rule.late, bonus=bonuses, keep=keep)
        else:
            decays = None if g is None else in_chunks(g.unsqueeze(-1), chunk).flatten(0, 1)
            self.decay = HeadDecay(readers, keys, decays, early=rule.early_erase)

    def _readers(self, q: Tensor, erase: Tensor | None) -> Tensor:
        """Return the readers [N B H, R, C, K]."""
        views = [chunk_views(x, self.chunk) for x in (q, erase) if x is not None]
        chunks, batch, heads = views[0].shape[:3]
        readers = q.new_empty(chunks, batch, heads, len(views), *views[0].shape[3:])
        torch.mul(views[0], self.rule.scale, out=readers[:, :, :, 0])
        for place, view in enumerate(views[1:], 1):
            readers[:, :, :, place] = view
        return readers.flatten(0, 2)

    def _by_chunk(self, x: Tensor) -> Tensor:
        """Return [N B H, ...] as [N, B H, ...]."""
        return x.unflatten(0, (len(self.v), -1))

    def _fades(self) -> list[Tensor | None]:
        fade = self.decay.decayed.fade
        return [None] * len(self.v) if fade is None else list(self._by_chunk(fade))

    def forward(self, into: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Write the outputs by token; return the last state and what a backward pass needs."""
        o, last, saved = self._add() if self.beta is None else self._erase()
        write_chunks(into, o)
        return last.view(self.state.shape), saved

    def _add(self) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
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

    def _erase(self) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
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

    def backward(self, saved: tuple[Tensor, ...], by_output: Tensor, by_last: Tensor, into: Inputs) -> Tensor:
        """Return the gradient of the first state; write the others by token, and add that of the bonus."""
        output, last = in_chunks(by_output, self.chunk).flatten(0, 1), by_last.flatten(0, 1)
        if self.beta is None:
            gradient, (v, beta, first) = self._add_backward(saved[0], output, last)
        else:
            gradient, (v, beta, first) = self._erase_backward(saved, output, last)
        readers, keys, g, bonus = self.decay.backward(gradient)
        erase = None
        if self.by_keys and self.beta is not None:
            keys = keys + readers[:, 1]
        elif self.beta is not None:
            erase = readers[:, 1]
        gradients = (readers[:, 0] * self.rule.scale, keys, v, g, beta, erase)
        for target, x in zip(into[:BY_TOKEN], gradients, strict=True):
            if target is not None and x is not None:
                write_chunks(target if target.ndim == 4 else target.unsqueeze(-1), self._by_chunk(x))
        if bonus is not None and into.bonus is not None:
            # head by head, so that the order of a sum does not depend on the number of heads
            for own, parts in zip(into.bonus, bonus.unflatten(0, (-1, len(into.bonus))).unbind(1), strict=True):
                own.add_(parts.contiguous().sum(0))
        return first.view(self.state.shape)

    def _by_fade(self, states: Tensor, later: Tensor) -> Tensor | None:
        fade = self.decay.decayed.fade
        if fade is None:
            return None
        gradient = (states * later).sum(-1, keepdim=True)
        return gradient if fade.shape[1] > 1 else gradient.sum(1, keepdim=True)

    def _add_backward(self, states: Tensor, output: Tensor, last: Tensor) -> Gradients:
        decayed, v = self.decay.decayed, self.v.flatten(0, 1)
        read = self._by_chunk(product(decayed.readers[:, 0].mT, output))
        after = []
        for fade, new in zip(reversed(self._fades()), reversed(read.unbind(0)), strict=True):
            after.append(last)
            last = last + new if fade is None else torch.addcmul(new, last, fade)
        later, states = torch.stack(after[::-1]).flatten(0, 1), states.flatten(0, 1)
        by_v = torch.baddbmm(product(decayed.scores[:, 0].mT, output), decayed.keys, later)
        gradient = Decayed(
            scores=product(output, v.mT).unsqueeze(1),
            readers=product(output, states.mT).unsqueeze(1),
            keys=product(v, later.mT),
            fade=self._by_fade(states, later),
        )
        return gradient, (by_v, None, last)

    def _erase_backward(self, saved: tuple[Tensor, ...], output: Tensor, last: Tensor) -> Gradients:
        assert self.beta is not None
        decayed, (states, update, inverse) = self.decay.decayed, (x.flatten(0, 1) for x in saved)
        read = self._by_chunk(product(decayed.readers[:, 0].mT, output))
        used = self._by_chunk(product(decayed.scores[:, 0].mT, output))
        transposed = inverse.mT.contiguous(), decayed.readers[:, 1].mT.contiguous()
        flat = [self._by_chunk(x).unbind(0) for x in (decayed.keys, *transposed)]
        chunks = list(zip(*flat, read, used, self.beta, self._fades(), strict=True))
        after, solved = [], []
        for keys, inverted, eraser, new, part, beta, fade in reversed(chunks):
            after.append(last)
            # the gradient of beta (v - P S_0), the right side of the system
            solved.append(torch.bmm(inverted, torch.baddbmm(part, keys, last)))
            carried = new + last if fade is None else torch.addcmul(new, last, fade)
            last = torch.baddbmm(carried, eraser, beta * solved[-1], alpha=-1)
        later, right = torch.stack(after[::-1]).flatten(0, 1), torch.stack(solved[::-1]).flatten(0, 1)
        beta = self.beta.flatten(0, 1)
        by_v = beta * right
        both = torch.cat([output, -by_v], 1)
        scores = product(both, update.mT)
        residual = self.v.flatten(0, 1) - torch.bmm(decayed.readers[:, 1], states)
        residual = torch.baddbmm(residual, decayed.scores[:, 1], update, alpha=-1)
        gradient = Decayed(
            scores=scores.unflatten(1, (2, -1)),
            readers=product(both, states.mT).unflatten(1, (2, -1)),
            keys=product(update, later.mT),
            fade=self._by_fade(states, later),
        )
        return gradient, (by_v, (right * residual).sum(-1, keepdim=True), last)
