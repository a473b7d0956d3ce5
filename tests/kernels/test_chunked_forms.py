"""Every chunked recurrence against the recurrence token by token: values, last state and gradients."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

import slimstate.kernels.chunk_scan
from slimstate.kernels import delta_rule, gla, rwkv6, state_space
from slimstate.kernels.chunk_scan import Inputs, Rule, chunk_scan, zero_state
from slimstate.kernels.chunks import inverse_by_halves, inverse_of_unit_lower
from slimstate.kernels.state_space import grouped

STRONGEST = -50.0
SIZES = [(8, 63, True), (8, 65, False), (8, 500, True), (64, 63, True), (64, 65, False), (64, 200, True)]


@dataclass(frozen=True)
class Form:
    """The two forms of a recurrence, and the tensors that they take after q, k and v."""

    naive: Callable
    chunked: Callable
    takes: tuple[str, ...] = ()
    by_name: tuple[str, ...] = ()


def in_groups(q, k, v, g, *, scale, state=None, chunk=64):
    """Compute gated linear attention as the scan of Mamba-2 for GPUs."""
    state = zero_state(k, v) if state is None else state
    skip, step = g.new_zeros(g.shape[2]), torch.ones_like(g)
    y, last = grouped(state_space.Inputs(x=v, step=step, g=g, B=k, C=q * scale, D=skip, state=state.mT), chunk)
    return y, last.mT


FORMS = {
    "linear attention": Form(gla.recurrence, gla.chunked),
    "mamba-2": Form(gla.recurrence, gla.chunked, ("by head",)),
    "mamba-2 in groups": Form(gla.recurrence, in_groups, ("by head",)),
    "gla": Form(gla.recurrence, gla.chunked, ("by channel",)),
    "rwkv-6": Form(rwkv6.recurrence, rwkv6.chunked, ("by channel",), ("bonus",)),
    "delta rule": Form(delta_rule.recurrence, delta_rule.chunked, ("beta",)),
    "gated delta rule": Form(delta_rule.recurrence, delta_rule.chunked, ("beta", "by head")),
    "comba": Form(delta_rule.recurrence, delta_rule.chunked, ("beta", "by head"), ("erase",)),
    "kda": Form(delta_rule.recurrence, delta_rule.chunked, ("beta", "by channel")),
}
every_form = pytest.mark.parametrize("name", FORMS)


def tensors(width: int, time: int, strong: bool, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Decays are weak, or at every other place of any strength down to e^-50."""
    draw = torch.Generator().manual_seed(time + width)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    values = {
        "q": normal(2, time, 2, width),
        "k": F.normalize(normal(2, time, 2, width), dim=-1),
        "v": normal(2, time, 2, width + 1),
        "beta": 2 * normal(2, time, 2).sigmoid(),
        "by head": -normal(2, time, 2).exp() / 10,
        "by channel": -normal(2, time, 2, width).exp() / 10,
        "erase": F.normalize(normal(2, time, 2, width), dim=-1),
        "bonus": normal(2, width),
        "state": normal(2, 2, width, width + 1),
    }
    for name in ("by head", "by channel") if strong else ():
        often = normal(*values[name].shape) > 0
        values[name] = torch.where(often, STRONGEST * normal(*values[name].shape).sigmoid().sqrt(), values[name])
    return {name: x.to(dtype).requires_grad_() for name, x in values.items()}


def arguments(form: Form, x: dict[str, torch.Tensor]) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return the positional and the named tensors of a form."""
    return [x[name] for name in ("q", "k", "v", *form.takes)], {name: x[name] for name in form.by_name}


def results(function: Callable, form: Form, x: dict[str, torch.Tensor], **options: int) -> list[torch.Tensor]:
    """Return the outputs, the last state, and the gradient of a loss with respect to all inputs."""
    inputs, named = arguments(form, x)
    pair = function(*inputs, **named, scale=0.4, state=x["state"], **options)
    draw = torch.Generator().manual_seed(0)
    loss = sum((y * torch.randn(y.shape, generator=draw).to(y)).sum() for y in pair)
    return [*pair, *torch.autograd.grad(loss, [*inputs, *named.values(), x["state"]])]


def assert_near(form: Form, x: dict[str, torch.Tensor], tolerance: float, **options: int) -> None:
    """Compare both forms, relative to the standard deviation."""
    for a, b in zip(results(form.chunked, form, x, **options), results(form.naive, form, x), strict=True):
        assert a.isfinite().all()
        assert (a - b).abs().max() <= tolerance * (b.std(unbiased=False) + 1e-3 * b.abs().max()), (a - b).abs().max()


@pytest.mark.slow
@every_form
@pytest.mark.parametrize("strong", [False, True])
@pytest.mark.parametrize(("time", "chunk"), [(1, 64), (5, 64), (64, 64), (70, 16), (130, 32)])
def test_chunks_give_the_values_and_gradients_of_the_recurrence(name, strong, time, chunk):
    assert_near(FORMS[name], tensors(6, time, strong, torch.float64), 1e-9, chunk=chunk)


@pytest.mark.slow
@every_form
@pytest.mark.parametrize(("width", "time", "strong"), SIZES)
def test_chunks_in_float32_are_as_precise_as_the_recurrence(name, width, time, strong):
    assert_near(FORMS[name], tensors(width, time, strong), 1e-4)


@pytest.mark.slow
@every_form
def test_a_gradient_in_groups_of_chunks_is_that_of_the_recurrence(name, monkeypatch):
    monkeypatch.setattr(slimstate.kernels.chunk_scan, "MIN_GROUP_ELEMENTS", 1)
    monkeypatch.setattr(state_space, "MAX_ELEMENTS", 1)
    assert_near(FORMS[name], tensors(6, 150, True, torch.float64), 1e-9, chunk=16)


@every_form
def test_a_state_carries_a_sequence_across_a_cut(name):
    form, x = FORMS[name], tensors(6, 100, True, torch.float64)
    inputs, named = arguments(form, x)

    def run(start: int, end: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        parts = {name: y if name == "bonus" else y[:, start:end] for name, y in named.items()}
        return form.chunked(*(y[:, start:end] for y in inputs), **parts, scale=1.0, state=state)

    expected, last = run(0, 100, x["state"])
    first, state = run(0, 37, x["state"])
    second, end = run(37, 100, state)
    torch.testing.assert_close(torch.cat([first, second], 1), expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(end, last, rtol=1e-10, atol=1e-10)


@every_form
def test_padding_after_a_sequence_does_not_change_its_state(name):
    """Packed sequences are padded by zeros of every input."""

    def pad(x: torch.Tensor) -> torch.Tensor:
        return F.pad(x, (*[0, 0] * (x.ndim - 2), 0, 30))

    form = FORMS[name]
    inputs, named = arguments(form, tensors(6, 40, True, torch.float64))
    padded = {name: x if name == "bonus" else pad(x) for name, x in named.items()}
    o, last = form.chunked(*inputs, **named, scale=1.0)
    more, end = form.chunked(*map(pad, inputs), **padded, scale=1.0)
    torch.testing.assert_close(more[:, :40], o)
    torch.testing.assert_close(end, last)


def saved_bytes(inputs: Inputs) -> int:
    """Return the bytes that autograd saves for a backward pass besides the inputs."""
    saved = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        chunk_scan(inputs, Rule())
    own = (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta)
    return sum(saved.values()) - sum(x.untyped_storage().nbytes() for x in own if x is not None)


@pytest.mark.parametrize(("beta", "decay"), [("beta", "by head"), ("beta", "by channel"), (None, "by channel")])
def test_memory_for_a_gradient_is_linear_in_the_length_and_at_most_twice_the_inputs(beta, decay):
    saved = []
    for time in (256, 512, 1024):
        x = tensors(64, time, False)
        inputs = Inputs(q=x["q"], k=x["k"], v=x["v"], g=x[decay], beta=None if beta is None else x[beta])
        saved.append(saved_bytes(inputs))
        assert saved[-1] <= 2 * sum(x[name].nbytes for name in "qkv")
    assert saved[2] - saved[1] == 2 * (saved[1] - saved[0])


@every_form
def test_heads_in_several_threads_give_the_same_bits(name, monkeypatch):
    monkeypatch.setattr(slimstate.kernels.chunk_scan, "MIN_THREAD_ELEMENTS", 1)
    form, x = FORMS[name], tensors(8, 130, True)
    alone = results(form.chunked, form, x)
    torch.set_num_threads(2)
    try:
        shared = results(form.chunked, form, x)
        with torch.inference_mode():
            inputs, named = arguments(form, x)
            inferred = form.chunked(*(y.detach().clone() for y in inputs), **named, scale=0.4, state=x["state"])
    finally:
        torch.set_num_threads(1)
    for a, b in zip(alone, shared, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(inferred[0], alone[0])


@pytest.mark.parametrize("size", [1, 2, 5, 63, 64])
def test_the_inverse_by_halves_is_that_of_the_triangular_system(size):
    x = torch.randn(3, size, size, generator=torch.Generator().manual_seed(size), dtype=torch.float64) / 4
    torch.testing.assert_close(inverse_by_halves(x.tril(-1)), inverse_of_unit_lower(x))
