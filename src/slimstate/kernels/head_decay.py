"""Apply one decay per head, or none, within chunks: products of queries and keys times a matrix of decays.

M chunks of C tokens, R readers (the queries, and the vectors that look up what to erase), K key dim. Decays are
logarithms g [M, C, 1] with the cumulative sum b; from a write at s to a read at t the decay is e^{b_t - b_s}, whose
exponent is never positive.
"""

import torch
from torch import Tensor

from slimstate.kernels.chunks import lower, product
from slimstate.system.value import Value


class Decayed(Value):
    """What the scan of chunks needs: the scores inside a chunk, and what reads and changes the state between chunks.

    The same fields hold the gradient of each.
    """

    scores: Tensor  # weights of tokens for each reader [M, R, C, C]: 0 above the diagonal, and on it for erasing
    readers: Tensor  # the readers of the state before the chunk [M, R, C, K]
    keys: Tensor  # the keys at the end of the chunk [M, C, K]
    fade: Tensor | None  # the decay of the state over the chunk [M, 1 or K, 1]; None is no decay


class HeadDecay:
    """One decay for all channels; with `early` the second reader reads the state before the decay of its own token."""

    def __init__(self, readers: Tensor, keys: Tensor, g: Tensor | None, *, early: bool = False) -> None:
        self.inputs, self.keys, self.g = readers, keys, g
        size = keys.shape[-2]
        products = product(readers.flatten(1, 2), keys.mT).view(*readers.shape[:3], size)
        masks = [lower(size, -place, keys.device) for place in range(readers.shape[1])]
        if g is None:
            self.between = torch.stack(masks).to(keys.dtype)
            self.decayed = Decayed(scores=products * self.between, readers=readers, keys=keys, fade=None)
            return
        # differences of large sums: in float32 a decay of e^-50 would leave few digits for the tokens after it
        total = g.double().cumsum(-2)
        seen = [total, total - g if early else total][: readers.shape[1]]
        pairs = zip(seen, masks, strict=True)
        between = [(end - total.mT).to(g).masked_fill_(~mask, -torch.inf) for end, mask in pairs]
        last = total[:, -1:]
        self.between = torch.stack(between, 1).exp_()
        self.from_start, self.to_end = torch.stack(seen, 1).to(g).exp(), (last - total).to(g).exp()
        self.early, scores, fade = early, products * self.between, last.to(g).exp()
        self.decayed = Decayed(scores=scores, readers=readers * self.from_start, keys=keys * self.to_end, fade=fade)

    def backward(self, by: Decayed) -> tuple[Tensor, Tensor, Tensor | None, None]:
        """Return the gradient of the readers, the keys and g; there is no bonus."""
        inside = (by.scores * self.between).flatten(1, 2)
        readers = product(inside, self.keys).view_as(self.inputs)
        keys = product(inside.mT, self.inputs.flatten(1, 2))
        if self.g is None:
            return readers + by.readers, keys + by.keys, None, None
        assert by.fade is not None
        assert self.decayed.fade is not None
        by_readers, by_keys = by.readers * self.from_start, by.keys * self.to_end
        # the weight of a token for itself has no decay: its terms in the row and column sums would cancel
        weights = (by.scores * self.decayed.scores).tril(-1)
        read = weights.sum(-1, keepdim=True) + (by_readers * self.inputs).sum(-1, keepdim=True)
        stored = (by_keys * self.keys).sum(-1, keepdim=True)
        end = stored.sum(-2, keepdim=True) + by.fade * self.decayed.fade
        at_once = read.sum(1) - weights.sum((1, 2)).unsqueeze(-1) - stored
        g = at_once.sum(-2, keepdim=True) - at_once.cumsum(-2) + at_once + end  # sums from each token to the end
        if self.early:
            g = g - read[:, 1]
        return readers + by_readers, keys + by_keys, g, None
