"""Apply a decay per channel within chunks, however strong: by halves of halves, without overflow.

M chunks of C tokens, R readers, K key dim; g [M, C, K], the logarithm of the decay. Between a write at s and a read at
t > s lies the decay of the tokens between them. For s in the left half of a block and t in its right half, that is the
decay from s to the end of the left half times the decay from there to t: two factors of at most 1, one applied to the
keys and one to the readers, and a matrix product. A block of two tokens has no decay in between. From there blocks are
doubled up to the chunk: at each step the readers of right halves get the decay of left halves, and the keys of left
halves that of right halves. No decay is ever divided by another.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from slimstate.kernels.chunks import product
from slimstate.kernels.head_decay import Decayed

MAX_ELEMENTWISE_TOKENS = 4  # tokens of half a block up to which a matrix product is slower than elementwise products


@dataclass(frozen=True)
class _Halves:
    """Blocks of one size, P of them in a chunk, with halves of L tokens."""

    readers: Tensor  # of right halves, relative to their start [M, P, R, L, K]
    keys: Tensor  # of left halves, relative to their end [M, P, L, K]
    left: Tensor  # the decay of the left half [M, P, K]
    right: Tensor


class ChannelDecay:
    """A decay for each channel. `late`: readers see the decay of their own token, and the first one its write.

    `bonus` [M, K]: the weight with which the first reader sees the write of its own token instead.
    """

    def __init__(
        self, readers: Tensor, keys: Tensor, g: Tensor, *, late: bool, bonus: Tensor | None, keep: bool
    ) -> None:
        self.inputs, self.keys, self.late = readers, keys, late
        self.bonus = None if bonus is None else bonus.unsqueeze(1)
        self.decay = g.exp()
        self.reading = readers * self.decay.unsqueeze(1) if late else readers  # readers of the state before their token
        self.halves: list[_Halves] = []
        scores = keys.new_zeros(*readers.shape[:3], keys.shape[1])
        local, ends, hop = self.reading.clone(), keys.clone(), self.decay
        half = 1
        while half < keys.shape[1]:
            left, right = hop.view(len(hop), -1, 2, hop.shape[2]).unbind(2)
            pair = _Halves(_right(local, half), _left(ends, half), left, right)
            _blocks(scores, half).copy_(_between(pair))
            if keep:
                self.halves.append(_Halves(pair.readers.clone(), pair.keys.clone(), left, right))
            pair.readers.mul_(left[:, :, None, None])
            pair.keys.mul_(right.unsqueeze(2))
            hop, half = left * right, 2 * half
        if late or bonus is not None:
            scores[:, 0].diagonal(0, -2, -1).copy_((self._own(readers[:, 0]) * keys).sum(-1))
        self.decayed = Decayed(scores=scores, readers=local, keys=ends, fade=hop.mT)

    def _own(self, x: Tensor) -> Tensor:
        """Return a reader or a key, weighted by the bonus, for its product with that of the same token."""
        return x if self.bonus is None else x * self.bonus

    def backward(self, by: Decayed) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return the gradient of the readers, the keys, g and the bonus."""
        assert by.fade is not None
        assert self.decayed.fade is not None
        reading, keys = by.readers.clone(), by.keys.clone()
        # the gradient of the logarithm of a half's decay: from everything that passes through the half
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
        keys.addcmul_(own, self._own(self.inputs[:, 0]))
        bonus = None if self.bonus is None else (own * self.inputs[:, 0] * self.keys).sum(1)
        return reading, keys, g, bonus


def _right(readers: Tensor, half: int) -> Tensor:
    """View the right halves of blocks [M, P, R, L, K] in [M, R, C, K]."""
    count, each, tokens, width = readers.shape
    return readers.view(count, each, tokens // (2 * half), 2, half, width).select(3, 1).transpose(1, 2)


def _left(keys: Tensor, half: int) -> Tensor:
    """View the left halves of blocks [M, P, L, K] in [M, C, K]."""
    count, tokens, width = keys.shape
    return keys.view(count, tokens // (2 * half), 2, half, width).select(2, 0)


def _blocks(scores: Tensor, half: int) -> Tensor:
    """View the scores of right halves for left halves [M, P, R, L, L] in [M, R, C, C]."""
    count, each, tokens, _ = scores.shape
    blocks = tokens // (2 * half)
    return _on_diagonal(scores.view(count, each, blocks, 2, half, blocks, 2, half).select(6, 0).select(3, 1))


def _between(halves: _Halves) -> Tensor:
    """Return the scores of the readers of right halves for the tokens of left halves [M, P, R, L, L]."""
    readers, keys = halves.readers, halves.keys
    if keys.shape[2] <= MAX_ELEMENTWISE_TOKENS:
        return (readers.unsqueeze(-2) * keys[:, :, None, None]).sum(-1)
    return _of_own_block(product(_rows(readers), keys.flatten(1, 2).mT), keys.shape[2])


def _between_backward(halves: _Halves, by: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of the readers and the keys."""
    readers, keys = halves.readers, halves.keys
    if keys.shape[2] <= MAX_ELEMENTWISE_TOKENS:
        by = by.unsqueeze(-1)
        return (by * keys[:, :, None, None]).sum(-2), (by * readers.unsqueeze(-2)).sum((2, 3))
    rows = _rows(readers)
    weights = rows.new_zeros(*rows.shape[:2], keys[0, :, :, 0].numel())
    _of_own_block(weights, keys.shape[2]).copy_(by)
    to_readers = product(weights, keys.flatten(1, 2)).unflatten(1, (readers.shape[2], *keys.shape[1:3]))
    return to_readers.transpose(1, 2), product(weights.mT, rows).view_as(keys)


def _rows(readers: Tensor) -> Tensor:
    """Return [M, P, R, L, K] as [M, R P L, K]."""
    return readers.transpose(1, 2).flatten(1, 3)


def _of_own_block(products: Tensor, half: int) -> Tensor:
    """View the products of readers and keys of the same block [M, P, R, L, L] in [M, R P L, P L].

    The others are not used: one product for a chunk is faster than many small ones.
    """
    count, rows, columns = products.shape
    return _on_diagonal(products.view(count, rows // columns, columns // half, half, columns // half, half))


def _on_diagonal(parts: Tensor) -> Tensor:
    """View the entries of the same block [M, P, R, L, L] in [M, R, P, L, P, L]."""
    return parts.diagonal(0, 2, 4).permute(0, 4, 1, 2, 3)
