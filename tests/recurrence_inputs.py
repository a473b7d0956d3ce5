"""Random queries, keys, values and gates for a recurrence."""

import torch


def inputs(batch, time, heads, groups, key_dim, value_dim, gated, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k = draw(batch, time, heads, key_dim), draw(batch, time, heads, key_dim)
    k = torch.nn.functional.normalize(k, dim=-1)
    v, beta = draw(batch, time, heads * groups, value_dim), 2 * draw(batch, time, heads * groups).sigmoid()
    g = -draw(batch, time, heads * groups).exp() if gated else None
    state = draw(batch, heads * groups, key_dim, value_dim)
    return [x.requires_grad_() for x in (q, k, v, beta, *([g] if gated else []))], state.requires_grad_()


def drawn(time: int = 20, heads: int = 2, groups: int = 4, g: str = "head") -> dict[str, torch.Tensor]:
    """What a rule takes: key dim 5, value dim 3."""
    torch.manual_seed(0)
    decay = (1, time, groups, 5) if g == "channel" else (1, time, groups)
    return {
        "q": torch.randn(1, time, heads, 5),
        "k": torch.randn(1, time, heads, 5),
        "v": torch.randn(1, time, groups, 3),
        "beta": torch.rand(1, time, groups),
        "g": -torch.rand(decay),
    }
