"""Decays of every channel within chunks, however strong: by sub-chunks, and no exponent is ever positive.

M chunks of C tokens in sub-chunks of S, R readers, K key dim; g [M, C, K], the logarithm of the decay. Between the
writing at s and a reading at t > s lies the decay of the tokens between. For s in an earlier sub-chunk that is what is
left at the beginning of t's own, times what is lost since: two factors of at most 1, one with the keys and one with
the readers, and a matrix product. Within a sub-chunk each distance is a sum over channels of its own, with the decays
multiplied up token by token. A quotient of cumulated decays, which overflows where they are strong, is never formed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from slimstate.kernels.chunks import product, sum_to_end
from slimstate.kernels.head_decay import Decayed, DecayedGradient

SUB = 8


def _up_to(decay: Tensor, *, from_end: bool = False) -> Tensor:
    """For every place of [M, n, S, K], the product of the decays of the places before it, or behind it."""
    places = decay.unbind(2)[:: -1 if from_end else 1]
    found = [torch.ones_like(places[0])]
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
        blocks = self._blocks(scores)
        for distance, reading, keys, between in self._distances():
            blocks.diagonal(-distance, -2, -1).copy_((reading * (keys * between).unsqueeze(1)).sum(-1))
        if self.late:
            scores[:, 0].diagonal(0, -2, -1).copy_((self.given[:, 0] * self.keys).sum(-1))
        return scores

    def _blocks(self, scores: Tensor) -> Tensor:
        """Of [M, R, C, C], those on the diagonal [M, R, n, S, S], as a view."""
        parts = scores.unflatten(-1, (-1, self.sub)).unflatten(2, (-1, self.sub))
        return parts.diagonal(0, 2, 4).permute(0, 1, 4, 2, 3)

    def _distances(self) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
        """In every sub-chunk, the tokens that read at a distance, those they read, and the decay between."""
        parts = [x.unflatten(-2, (-1, self.sub)) for x in (self.reading, self.keys, self.decay)]
        reading, keys, decay = parts
        between = torch.ones_like(keys[:, :, 1:])
        for distance in range(1, self.sub):
            yield distance, reading[:, :, :, distance:], keys[:, :, :-distance], between
            between = between[:, :, 1:] * decay[:, :, 1:-distance]

    def backward(self, by: DecayedGradient) -> tuple[Tensor, Tensor, Tensor]:
        """The gradient by readers, keys and g."""
        local, ends = self._backward_between(by)
        reading, keys = (local * self.since.unsqueeze(1)).flatten(2, 3), (ends * self.until).flatten(1, 2)
        parts = reading.unflatten(2, (-1, self.sub)), keys.unflatten(1, (-1, self.sub))
        blocks = self._blocks(by.scores)
        nearest = None
        for distance, given, read, between in self._distances():
            weight = blocks.diagonal(-distance, -2, -1).unsqueeze(-1)
            to_reading, to_keys = weight * (read * between).unsqueeze(1), (weight * given).sum(1) * between
            if distance == 1:  # no decay lies between neighbours: theirs joins in when the decays are done
                nearest = to_reading, to_keys
                continue
            parts[0][:, :, :, distance:] += to_reading
            parts[1][:, :, :-distance] += to_keys
        assert by.fade is not None
        assert self.decayed.fade is not None
        end = (by.keys * self.decayed.keys).sum(1, keepdim=True) + (by.fade * self.decayed.fade).mT
        seen = (reading * self.reading).sum(1)
        g = sum_to_end(seen - keys * self.keys) - seen + end
        if nearest is not None:
            parts[0][:, :, :, 1:] += nearest[0]
            parts[1][:, :, :-1] += nearest[1]
        if not self.late:
            return reading, keys, g
        own = by.scores[:, 0].diagonal(0, -2, -1).unsqueeze(-1)
        g = g + (reading * self.reading).sum(1)
        readers = reading * self.decay.unsqueeze(1)
        readers[:, 0] += own * self.keys
        return readers, keys + own * self.given[:, 0], g

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
