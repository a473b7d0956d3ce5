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

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from slimstate.kernels.channel_decay import SUB, ChannelDecay
from slimstate.kernels.chunks import in_chunks, in_time, inverse_of_unit_lower, product
from slimstate.kernels.head_decay import DecayedGradient, HeadDecay
from slimstate.system.threads import side_by_side

# tokens of a chunk: longer ones take more inside of them, most of all where every channel decays, shorter ones more
# of the state between them
CHUNK, CHUNK_BY_CHANNEL = 64, 32


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


def chunk_scan(inputs: Inputs, state: Tensor | None, rule: Rule) -> tuple[Tensor, Tensor]:
    """The outputs [B, T, H, V] and the last state of a recurrence."""
    if state is None:
        shape = inputs.v.shape
        state = inputs.v.new_zeros(shape[0], shape[2], inputs.k.shape[-1], shape[3])
    given = (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, inputs.erase, state)
    o, last = _ChunkScan.apply(rule, *given)  # type: ignore[no-untyped-call]
    return o, last


Given = tuple[Tensor | None, ...]


class _ChunkScan(torch.autograd.Function):
    """On a CPU the heads are shared out among threads: nothing goes from one to another."""

    @staticmethod
    def forward(ctx: Any, rule: Rule, *given: Tensor | None) -> tuple[Tensor, Tensor]:
        parts = _by_heads(given)
        with torch.autocast(given[0].device.type, enabled=False):  # type: ignore[union-attr]
            found = side_by_side(lambda part: _Chunks(rule, part).forward(), parts)
        ctx.rule, ctx.parts, ctx.kept = rule, len(parts), len(found[0][2])
        ctx.save_for_backward(*given, *(tensor for _, _, kept in found for tensor in kept))
        return _joined([o for o, _, _ in found], 2).contiguous(), _joined([last for _, last, _ in found], 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_output: Tensor, by_last: Tensor) -> tuple[Any, ...]:
        given, kept, each = ctx.saved_tensors[:7], ctx.saved_tensors[7:], ctx.kept
        outputs, lasts = by_output.chunk(ctx.parts, 2), by_last.chunk(ctx.parts, 1)

        def work(number: int) -> tuple[Tensor | None, ...]:
            own = kept[number * each : (number + 1) * each]
            return _Chunks(ctx.rule, parts[number]).backward(own, outputs[number], lasts[number])

        parts = _by_heads(given, ctx.parts)
        with torch.autocast(by_output.device.type, enabled=False):
            found = side_by_side(work, range(len(parts)))
        axes = (2, 2, 2, 2, 2, 2, 1)
        return None, *(
            None if tensors[0] is None else _joined(tensors, axis)
            for tensors, axis in zip(zip(*found, strict=True), axes, strict=True)
        )


def _by_heads(given: Given, parts: int | None = None) -> list[Given]:
    """The inputs and the state of some heads each: as many parts as there are cores, where that is worth while."""
    state = given[-1]
    assert state is not None
    if parts is None:
        worth = state.device.type == "cpu" and given[0] is not None and given[0].shape[1] > CHUNK
        parts = math.gcd(state.shape[1], torch.get_num_threads()) if worth else 1
    split = [[None] * parts if x is None else x.chunk(parts, 1 if x is state else 2) for x in given]
    return list(zip(*split, strict=True))


def _joined(tensors: tuple[Tensor, ...] | list[Tensor], axis: int) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, axis)


class _Chunks:
    """The inputs of a recurrence in chunks, and what their decays make of them."""

    def __init__(self, rule: Rule, given: Given) -> None:
        q, k, v, g, beta, erase, state = given
        assert q is not None
        assert k is not None
        assert v is not None
        assert state is not None
        self.rule, self.state, self.shape = rule, state, v.shape
        by_channel = g is not None and g.ndim == k.ndim
        # sub-chunks are whole
        chunk = rule.chunk or (CHUNK_BY_CHANNEL if by_channel else CHUNK)
        self.chunk = min(chunk, -(-v.shape[1] // SUB) * SUB if by_channel else v.shape[1])
        self.v = self._split(v)
        keys = self._split(k).flatten(0, 1)
        readers = [self._split(q).flatten(0, 1) * rule.scale]
        self.beta = None
        if beta is not None:
            readers.append(keys if erase is None else self._split(erase).flatten(0, 1))
            self.beta = self._split(beta.unsqueeze(-1))
        stacked = torch.stack(readers, 1)
        self.decay: HeadDecay | ChannelDecay
        if g is not None and by_channel:
            self.decay = ChannelDecay(stacked, keys, self._split(g).flatten(0, 1), late=rule.late)
        else:
            decay = None if g is None else self._split(g.unsqueeze(-1)).flatten(0, 1)
            self.decay = HeadDecay(stacked, keys, decay, early=rule.early_erase)
        self.by_keys = erase is None

    def _split(self, x: Tensor) -> Tensor:
        return in_chunks(x, self.chunk)

    def _by_chunk(self, x: Tensor) -> Tensor:
        """[N B H, ...] to [N, B H, ...]."""
        return x.unflatten(0, (len(self.v), -1))

    def _fades(self) -> list[Tensor | None]:
        fade = self.decay.decayed.fade
        return [None] * len(self.v) if fade is None else list(self._by_chunk(fade))

    def forward(self) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """The outputs, the last state, and what a backward pass needs."""
        o, last, kept = self._added() if self.beta is None else self._erasing()
        batch, time = self.shape[:2]
        return in_time(o, batch, time), last.view_as(self.state), kept

    def _added(self) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        decayed, v = self.decay.decayed, self.v.flatten(0, 1)
        written = self._by_chunk(product(decayed.keys.mT, v))
        carried, states = self.state.flatten(0, 1), []
        for fade, new in zip(self._fades(), written, strict=True):
            states.append(carried)
            carried = carried + new if fade is None else torch.addcmul(new, carried, fade)
        before = torch.stack(states)
        inside = product(decayed.scores[:, 0], v)
        o = torch.baddbmm(inside, decayed.readers[:, 0], before.flatten(0, 1))
        return self._by_chunk(o), carried, (before,)

    def _erasing(self) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        assert self.beta is not None
        decayed = self.decay.decayed
        system = self.beta.flatten(0, 1) * decayed.scores[:, 1]
        inverse = inverse_of_unit_lower(system)
        carried, states, updates, read = self.state.flatten(0, 1), [], [], []
        flat = (self._by_chunk(x) for x in (decayed.readers.flatten(1, 2), inverse, decayed.keys.mT.contiguous()))
        for readers, solved, keys, v, beta, fade in zip(*flat, self.v, self.beta, self._fades(), strict=True):
            states.append(carried)
            seen = torch.bmm(readers, carried)
            updates.append(torch.bmm(solved, beta * (v - seen[:, self.chunk :])))
            carried = torch.baddbmm(carried if fade is None else carried * fade, keys, updates[-1])
            read.append(seen[:, : self.chunk])
        update = torch.stack(updates)
        o = torch.baddbmm(torch.stack(read).flatten(0, 1), decayed.scores[:, 0], update.flatten(0, 1))
        return self._by_chunk(o), carried, (torch.stack(states), update, inverse)

    def backward(self, kept: tuple[Tensor, ...], by_output: Tensor, by_last: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient by q, k, v, g, beta, erase and the state."""
        output, last = self._split(by_output).flatten(0, 1), by_last.flatten(0, 1)
        if self.beta is None:
            gradient, (v, beta, first) = self._added_backward(kept[0], output, last)
        else:
            gradient, (v, beta, first) = self._erasing_backward(kept, output, last)
        readers, keys, g = self.decay.backward(gradient)
        erase = None
        if self.by_keys and self.beta is not None:
            keys = keys + readers[:, 1]
        elif self.beta is not None:
            erase = readers[:, 1]
        tensors = (readers[:, 0] * self.rule.scale, keys, v, g, beta, erase)
        found = [None if x is None else self._joined(x) for x in tensors]
        for place in (3, 4):  # g and beta, where they are numbers of a head
            each = found[place]
            if each is not None and (place == 4 or isinstance(self.decay, HeadDecay)):
                found[place] = each.squeeze(-1)
        return (*found, first.view_as(self.state))

    def _joined(self, x: Tensor) -> Tensor:
        return in_time(self._by_chunk(x), *self.shape[:2])

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
        decayed, (states, update, inverse) = self.decay.decayed, kept
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
        states, update, beta = states.flatten(0, 1), update.flatten(0, 1), self.beta.flatten(0, 1)
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
