"""Decays of every channel within chunks, however strong: by sub-chunks, and nothing can overflow.

M chunks of C tokens in sub-chunks of S, R readers, K key dim; g [M, C, K], the logarithm of the decay. Between the
writing at s and a reading at t > s lies the decay of the tokens between. For s in an earlier sub-chunk that is what is
left at the beginning of t's own, times what is lost since: two factors of at most 1, one with the keys and one with
the readers, and a matrix product. Within a sub-chunk it is a quotient of cumulated decays, which would overflow where
they are strong: so they are cumulated from the middle of the sub-chunk, and a token's decay counts there as no stronger
than what rounding leaves of it (`FAINTEST`). Then no factor is larger than e^64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from slimstate.kernels.chunks import lower, product, sum_to_end
from slimstate.kernels.head_decay import Decayed, DecayedGradient

SUB = 8
# the logarithm of what is nothing beside 1; half of a sub-chunk of them is still a number
FAINTEST = {torch.float32: -16.0, torch.float64: -40.0}


def _up_to(decay: Tensor, *, first: Tensor | None = None, from_end: bool = False) -> Tensor:
    """For every place of [M, n, S, K], the product of `first` and the decays of the places before it, or behind it."""
    places = decay.unbind(2)[:: -1 if from_end else 1]
    found = [torch.ones_like(places[0]) if first is None else first]
    for place in places[:-1]:
        found.append(found[-1] * place)
    return torch.stack(found[:: -1 if from_end else 1], 2)


class ChannelDecay:
    """A decay for each channel. `late`: readers see the decay and, the first one, the writing of their own token."""

    def __init__(self, readers: Tensor, keys: Tensor, g: Tensor, *, late: bool) -> None:
        self.given, self.keys, self.late = readers, keys, late
        self.sub = min(SUB, keys.shape[-2])
        self.decay = g.exp()
        # readers of the state before their token
        self.reading = readers * self.decay.unsqueeze(1) if late else readers
        steps = self.decay.unflatten(1, (-1, self.sub))
        self.since, self.until = _up_to(steps), _up_to(steps, from_end=True)
        self.hop = steps[:, :, -1:] * self.since[:, :, -1:]
        self.before = _up_to(self.hop.transpose(1, 2)).transpose(1, 2)
        self.local = self.reading.unflatten(2, (-1, self.sub)) * self.since.unsqueeze(1)
        self.ends = self.keys.unflatten(1, (-1, self.sub)) * self.until
        self.carried = self._carried()
        faintest = FAINTEST.get(g.dtype, -16.0)
        near = steps.clamp_min(math.exp(faintest))
        middle = g.clamp_min(faintest).unflatten(1, (-1, self.sub)).sum(2) / 2
        self.rising = _up_to(near, first=(-middle).exp_())
        self.falling = (self.rising * near).reciprocal_()
        self.decayed = Decayed(
            scores=self._scores(),
            readers=(self.local * self.before.unsqueeze(1)).flatten(2, 3),
            keys=self.carried[-1],
            fade=(self.before[:, -1] * self.hop[:, -1]).mT,
        )

    def _carried(self) -> list[Tensor]:
        """The keys of all earlier sub-chunks as they are left at the end of each one [M, n S, K]."""
        found = [self.ends[:, 0]]
        for n in range(1, self.ends.shape[1]):
            found.append(torch.cat([found[-1] * self.hop[:, n], self.ends[:, n]], 1))
        return found

    def _scores(self) -> Tensor:
        size = self.keys.shape[1]
        scores = self.keys.new_zeros(*self.given.shape[:3], size)
        for n, keys in enumerate(self.carried[:-1], 1):
            rows = product(self.local[:, :, n].flatten(1, 2), keys.mT)
            scores[:, :, n * self.sub : (n + 1) * self.sub, : n * self.sub] = rows.unflatten(1, (-1, self.sub))
        reading, keys = self._near()
        inside = product(reading.flatten(0, 1), keys.flatten(0, 1).mT)
        earlier = lower(self.sub, -1, inside.device).repeat(self.given.shape[1], 1)
        blocks = inside.masked_fill_(~earlier, 0).view(len(scores), -1, self.given.shape[1], self.sub, self.sub)
        self._blocks(scores).copy_(blocks.transpose(1, 2))
        if self.late:
            scores[:, 0].diagonal(0, -2, -1).copy_((self.given[:, 0] * self.keys).sum(-1))
        return scores

    def _blocks(self, scores: Tensor) -> Tensor:
        """Of [M, R, C, C], those on the diagonal [M, R, n, S, S], as a view."""
        parts = scores.unflatten(-1, (-1, self.sub)).unflatten(2, (-1, self.sub))
        return parts.diagonal(0, 2, 4).permute(0, 1, 4, 2, 3)

    def _near(self) -> tuple[Tensor, Tensor]:
        """Readers [M, n, R S, K] and keys [M, n, S, K] whose products are those within sub-chunks."""
        reading = self.reading.unflatten(2, (-1, self.sub)) * self.rising.unsqueeze(1)
        return reading.transpose(1, 2).flatten(2, 3), self.keys.unflatten(1, (-1, self.sub)) * self.falling

    def backward(self, by: DecayedGradient) -> tuple[Tensor, Tensor, Tensor]:
        """The gradient by readers, keys and g."""
        local, ends = self._backward_between(by)
        reading, keys = (local * self.since.unsqueeze(1)).flatten(2, 3), (ends * self.until).flatten(1, 2)
        blocks = self._blocks(by.scores)
        to_reading, to_keys = self._backward_near(blocks)
        reading, keys = reading + to_reading, keys + to_keys
        assert by.fade is not None
        assert self.decayed.fade is not None
        end = (by.keys * self.decayed.keys).sum(1, keepdim=True) + (by.fade * self.decayed.fade).mT
        seen = (reading * self.reading).sum(1)
        g = sum_to_end(seen - keys * self.keys) - seen + end
        if self.sub > 1:  # no decay lies between neighbours: theirs joins in when the decays are done
            weight = blocks.diagonal(-1, -2, -1).unsqueeze(-1)
            parts = reading.unflatten(2, (-1, self.sub)), keys.unflatten(1, (-1, self.sub))
            given = self.reading.unflatten(2, (-1, self.sub))
            parts[0][:, :, :, 1:] += weight * self.keys.unflatten(1, (-1, self.sub))[:, None, :, :-1]
            parts[1][:, :, :-1] += (weight * given[:, :, :, 1:]).sum(1)
        if not self.late:
            return reading, keys, g
        own = by.scores[:, 0].diagonal(0, -2, -1).unsqueeze(-1)
        g = g + (reading * self.reading).sum(1)
        readers = reading * self.decay.unsqueeze(1)
        readers[:, 0] += own * self.keys
        return readers, keys + own * self.given[:, 0], g

    def _backward_near(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient by readers and keys of what lies two or more tokens apart within sub-chunks."""
        chunks, readers = blocks.shape[:2]
        weights = blocks.tril(-2).transpose(1, 2).flatten(2, 3).flatten(0, 1)
        reading, keys = (x.flatten(0, 1) for x in self._near())
        to_reading = product(weights, keys).view(chunks, -1, readers, self.sub, keys.shape[-1])
        to_keys = product(weights.mT, reading).view(chunks, -1, self.sub, keys.shape[-1])
        to_reading = to_reading.transpose(1, 2) * self.rising.unsqueeze(1)
        return to_reading.flatten(2, 3), (to_keys * self.falling).flatten(1, 2)

    def _backward_between(self, by: DecayedGradient) -> tuple[Tensor, Tensor]:
        """The gradient by `local` and by `ends`, of what goes from one sub-chunk to another or beyond the chunk."""
        local = by.readers.unflatten(2, (-1, self.sub)) * self.before.unsqueeze(1)
        ends, later = torch.empty_like(self.ends), by.keys
        for n in range(self.ends.shape[1] - 1, 0, -1):
            start = n * self.sub
            ends[:, n], later = later[:, start:], later[:, :start] * self.hop[:, n]
            rows = by.scores[:, :, start : start + self.sub, :start].flatten(1, 2)
            local[:, :, n] += product(rows, self.carried[n - 1]).unflatten(1, (-1, self.sub))
            later = later + product(rows.mT, self.local[:, :, n].flatten(1, 2))
        ends[:, 0] = later
        return local, ends
