"""Decays of every channel within chunks, however strong: by halves of halves, and nothing can overflow.

M chunks of C tokens, R readers, K key dim; g [M, C, K], the logarithm of the decay. Between the writing at s and a
reading at t > s lies the decay of the tokens between. For s in the left half of a block and t in its right half that is
what is left at the end of the left one, times what is lost since: two factors of at most 1, one with the keys and one
with the readers, and a matrix product. A block of two tokens has no decay in between. From there blocks are doubled
until they are the chunk: at each step the readers of right halves lose what left halves do, and the keys of left halves
what right ones do, and no decay is divided by another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slimstate.kernels.chunks import product
from slimstate.kernels.head_decay import Decayed, DecayedGradient

# tokens of half a block, up to which a product of matrices takes longer than all products of their numbers
SMALL = 4


@dataclass(frozen=True)
class _Halves:
    """Blocks of one size, P of them in a chunk, with halves of L tokens."""

    readers: Tensor  # of right halves, what is left at their beginning [M, P, R, L, K]
    keys: Tensor  # of left halves, as they are at their end [M, P, L, K]
    left: Tensor  # the decay of the whole left half [M, P, K]
    right: Tensor


class ChannelDecay:
    """A decay for each channel. `late`: readers see the decay and, the first one, the writing of their own token.

    `bonus` [M, K]: how much of the writing of its own token the first reader sees instead.
    """

    def __init__(
        self, readers: Tensor, keys: Tensor, g: Tensor, *, late: bool, bonus: Tensor | None, keep: bool
    ) -> None:
        self.given, self.keys, self.late = readers, keys, late
        self.bonus = None if bonus is None else bonus.unsqueeze(1)
        self.decay = g.exp()
        # readers of the state before their token
        self.reading = readers * self.decay.unsqueeze(1) if late else readers
        self.halves: list[_Halves] = []
        scores = keys.new_zeros(*readers.shape[:3], keys.shape[1])
        local, ends, hop = self.reading.clone(), keys.clone(), self.decay
        half = 1
        while half < keys.shape[1]:
            pair = self._pair(local, ends, hop, half)
            _blocks(scores, half).copy_(_between(pair))
            if keep:
                self.halves.append(_Halves(pair.readers.clone(), pair.keys.clone(), pair.left, pair.right))
            pair.readers.mul_(pair.left[:, :, None, None])
            pair.keys.mul_(pair.right.unsqueeze(2))
            hop, half = pair.left * pair.right, 2 * half
        if late or bonus is not None:
            scores[:, 0].diagonal(0, -2, -1).copy_((self._own(readers[:, 0]) * keys).sum(-1))
        self.decayed = Decayed(scores=scores, readers=local, keys=ends, fade=hop.mT)

    def _own(self, x: Tensor) -> Tensor:
        """Of a reader or a key, as much as the other one of its token has to do with it."""
        return x if self.bonus is None else x * self.bonus

    @staticmethod
    def _pair(local: Tensor, ends: Tensor, hop: Tensor, half: int) -> _Halves:
        """Views of the halves of all blocks."""
        left, right = hop.view(len(hop), -1, 2, hop.shape[2]).unbind(2)
        return _Halves(_right(local, half), _left(ends, half), left, right)

    def backward(self, by: DecayedGradient) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """The gradient by readers, keys, g and the bonus."""
        assert by.fade is not None
        assert self.decayed.fade is not None
        reading, keys = by.readers.clone(), by.keys.clone()
        # by the logarithm of the decay of a whole half: of all that goes through it
        g = (by.fade * self.decayed.fade).mT
        for halves in reversed(self.halves):
            half = halves.keys.shape[2]
            to_readers, to_keys = _right(reading, half), _left(keys, half)
            to_readers.mul_(halves.left[:, :, None, None])
            to_keys.mul_(halves.right.unsqueeze(2))
            left = (to_readers * halves.readers).sum((2, 3))
            right = (to_keys * halves.keys).sum(2)
            g = torch.stack([g + left, g + right], 2).flatten(1, 2)
            more_readers, more_keys = _between_backward(halves, _blocks(by.scores, half))
            to_readers.add_(more_readers)
            to_keys.add_(more_keys)
        if self.late:
            g = g + (reading * self.reading).sum(1)
            reading = reading * self.decay.unsqueeze(1)
        if not self.late and self.bonus is None:
            return reading, keys, g, None
        own = by.scores[:, 0].diagonal(0, -2, -1).unsqueeze(-1)
        reading[:, 0].addcmul_(own, self._own(self.keys))
        keys.addcmul_(own, self._own(self.given[:, 0]))
        bonus = None if self.bonus is None else (own * self.given[:, 0] * self.keys).sum(1)
        return reading, keys, g, bonus


def _right(readers: Tensor, half: int) -> Tensor:
    """Of [M, R, C, K] the right halves of blocks [M, P, R, L, K], as a view."""
    count, each, tokens, width = readers.shape
    return readers.view(count, each, tokens // (2 * half), 2, half, width).select(3, 1).transpose(1, 2)


def _left(keys: Tensor, half: int) -> Tensor:
    """Of [M, C, K] the left halves of blocks [M, P, L, K], as a view."""
    count, tokens, width = keys.shape
    return keys.view(count, tokens // (2 * half), 2, half, width).select(2, 0)


def _blocks(scores: Tensor, half: int) -> Tensor:
    """Of [M, R, C, C], where right halves of blocks meet left ones [M, P, R, L, L], as a view."""
    count, each, tokens, _ = scores.shape
    blocks = tokens // (2 * half)
    parts = scores.view(count, each, blocks, 2, half, blocks, 2, half)
    return _on_diagonal(parts.select(6, 0).select(3, 1))


def _between(halves: _Halves) -> Tensor:
    """What the readers of right halves get of the tokens of left ones [M, P, R, L, L]."""
    readers, keys = halves.readers, halves.keys
    if keys.shape[2] <= SMALL:
        return (readers.unsqueeze(-2) * keys[:, :, None, None]).sum(-1)
    return _of_own_block(product(_rows(readers), keys.flatten(1, 2).mT), keys.shape[2])


def _between_backward(halves: _Halves, by: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient by readers and keys."""
    readers, keys = halves.readers, halves.keys
    if keys.shape[2] <= SMALL:
        by = by.unsqueeze(-1)
        return (by * keys[:, :, None, None]).sum(-2), (by * readers.unsqueeze(-2)).sum((2, 3))
    rows = _rows(readers)
    weights = rows.new_zeros(*rows.shape[:2], keys[0, :, :, 0].numel())
    _of_own_block(weights, keys.shape[2]).copy_(by)
    to_readers = product(weights, keys.flatten(1, 2)).unflatten(1, (readers.shape[2], *keys.shape[1:3]))
    return to_readers.transpose(1, 2), product(weights.mT, rows).view_as(keys)


def _rows(readers: Tensor) -> Tensor:
    """[M, P, R, L, K] as [M, R P L, K]."""
    return readers.transpose(1, 2).flatten(1, 3)


def _of_own_block(products: Tensor, half: int) -> Tensor:
    """Of [M, R P L, P L] what readers and keys of one block have [M, P, R, L, L], as a view.

    The others are made for nothing: one product for a chunk takes less time than many small ones.
    """
    count, rows, columns = products.shape
    return _on_diagonal(products.view(count, rows // columns, columns // half, half, columns // half, half))


def _on_diagonal(parts: Tensor) -> Tensor:
    """Of [M, R, P, L, P, L] those of one block [M, P, R, L, L], as a view."""
    return parts.diagonal(0, 2, 4).permute(0, 4, 1, 2, 3)
