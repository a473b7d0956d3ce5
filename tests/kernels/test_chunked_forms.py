"""Every chunked recurrence against its twin, one token after the other: values, last state and gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

import slimstate.kernels.chunk_scan
from slimstate.kernels import delta_rule, gla, rwkv6
from slimstate.kernels.chunk_scan import Inputs, Rule, chunk_scan
from slimstate.kernels.chunks import inverse_by_halves, inverse_of_unit_lower

STRONGEST = -50.0


@dataclass(frozen=True)
class Form:
    """The two forms of a recurrence, and which tensors they take behind q, k and v."""

    naive: Callable
    chunked: Callable
    takes: tuple[str, ...] = ()
    by_name: tuple[str, ...] = ()


FORMS = {
    "linear attention": Form(gla.recurrence, gla.chunked),
    "mamba-2": Form(gla.recurrence, gla.chunked, ("by head",)),
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

    found = {
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
        often = normal(*found[name].shape) > 0
        found[name] = torch.where(often, STRONGEST * normal(*found[name].shape).sigmoid().sqrt(), found[name])
    return {name: x.to(dtype).requires_grad_() for name, x in found.items()}


def results(form: Callable, which: Form, given: dict[str, torch.Tensor], **options: int) -> list[torch.Tensor]:
    """Outputs, last state, and the gradient of a loss by all inputs."""
    inputs = [given[name] for name in ("q", "k", "v", *which.takes)]
    named = {name: given[name] for name in which.by_name}
    pair = form(*inputs, **named, scale=0.4, state=given["state"], **options)
    draw = torch.Generator().manual_seed(0)
    loss = sum((x * torch.randn(x.shape, generator=draw).to(x)).sum() for x in pair)
    return [*pair, *torch.autograd.grad(loss, [*inputs, *named.values(), given["state"]])]


def assert_near(found: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float) -> None:
    """Relative to the standard deviation."""
    for a, b in zip(found, expected, strict=True):
        assert a.isfinite().all()
        assert (a - b).abs().max() <= tolerance * (b.std(unbiased=False) + 1e-3 * b.abs().max()), (a - b).abs().max()


@every_form
@pytest.mark.parametrize("strong", [False, True])
@pytest.mark.parametrize(("time", "chunk"), [(1, 64), (5, 64), (64, 64), (70, 16), (130, 32)])
def test_chunks_give_the_values_and_gradients_of_the_recurrence(name, strong, time, chunk):
    form, given = FORMS[name], tensors(6, time, strong, torch.float64)
    assert_near(results(form.chunked, form, given, chunk=chunk), results(form.naive, form, given), 1e-9)


@pytest.mark.slow
@every_form
@pytest.mark.parametrize("width", [8, 64])
@pytest.mark.parametrize(("time", "strong"), [(63, True), (65, False), (200, True)])
def test_chunks_in_float32_are_as_good_as_the_recurrence(name, width, time, strong):
    form, given = FORMS[name], tensors(width, time, strong)
    assert_near(results(form.chunked, form, given), results(form.naive, form, given), 1e-4)


@pytest.mark.slow
@every_form
@pytest.mark.parametrize("strong", [False, True])
def test_a_window_of_a_thousand_tokens_is_as_good(name, strong):
    form, given = FORMS[name], tensors(8, 1000, strong)
    assert_near(results(form.chunked, form, given), results(form.naive, form, given), 1e-4)


@every_form
def test_a_gradient_made_in_groups_of_chunks_is_that_of_the_recurrence(name, monkeypatch):
    monkeypatch.setattr(slimstate.kernels.chunk_scan, "SMALL_GROUP", 1)
    form, given = FORMS[name], tensors(6, 150, True, torch.float64)
    assert_near(results(form.chunked, form, given, chunk=16), results(form.naive, form, given), 1e-9)


@every_form
def test_a_state_carries_a_sequence_across_a_cut(name):
    form, given = FORMS[name], tensors(6, 100, True, torch.float64)
    named = {each: given[each] for each in form.by_name}

    def run(start: int, end: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        whole = {each: x if each == "bonus" else x[:, start:end] for each, x in named.items()}
        inputs = [given[each][:, start:end] for each in ("q", "k", "v", *form.takes)]
        return form.chunked(*inputs, **whole, scale=1.0, state=state)

    expected, last = run(0, 100, given["state"])
    first, state = run(0, 37, given["state"])
    second, end = run(37, 100, state)
    torch.testing.assert_close(torch.cat([first, second], 1), expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(end, last, rtol=1e-10, atol=1e-10)


@every_form
def test_padding_behind_a_sequence_leaves_its_state(name):
    """As packed sequences of other lengths make it: zeros of every input."""
    form, given = FORMS[name], tensors(6, 40, True, torch.float64)
    named = {each: given[each] for each in form.by_name}
    padded = {each: x if each == "bonus" else F.pad(x, (*[0, 0] * (x.ndim - 2), 0, 30)) for each, x in named.items()}
    inputs = [given[each] for each in ("q", "k", "v", *form.takes)]
    longer = [F.pad(x, (*[0, 0] * (x.ndim - 2), 0, 30)) for x in inputs]
    o, last = form.chunked(*inputs, **named, scale=1.0)
    more, end = form.chunked(*longer, **padded, scale=1.0)
    torch.testing.assert_close(more[:, :40], o)
    torch.testing.assert_close(end, last)


def kept_bytes(time: int, inputs: Inputs) -> int:
    """What autograd holds for a backward pass besides the inputs."""
    held = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        held[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        chunk_scan(inputs, None, Rule())
    given = (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta)
    return sum(held.values()) - sum(x.untyped_storage().nbytes() for x in given if x is not None)


@pytest.mark.parametrize(("beta", "decay"), [("beta", "by head"), ("beta", "by channel"), (None, "by channel")])
def test_what_is_kept_for_a_gradient_is_linear_in_the_length_and_no_more_than_twice_the_inputs(beta, decay):
    kept = []
    for time in (256, 512, 1024):
        x = tensors(64, time, False)
        inputs = Inputs(q=x["q"], k=x["k"], v=x["v"], g=x[decay], beta=None if beta is None else x[beta])
        kept.append(kept_bytes(time, inputs))
        assert kept[-1] <= 2 * sum(x[name].nbytes for name in "qkv")
    assert kept[2] - kept[1] == 2 * (kept[1] - kept[0])


@every_form
def test_heads_shared_out_among_threads_are_the_same_to_the_last_bit(name, monkeypatch):
    monkeypatch.setattr(slimstate.kernels.chunk_scan, "WORTH_A_THREAD", 1)
    form, given = FORMS[name], tensors(8, 130, True)
    alone = results(form.chunked, form, given)
    torch.set_num_threads(2)
    try:
        shared = results(form.chunked, form, given)
        with torch.inference_mode():
            inputs = [given[each].detach().clone() for each in ("q", "k", "v", *form.takes)]
            named = {each: given[each] for each in form.by_name}
            inferred = form.chunked(*inputs, **named, scale=0.4, state=given["state"])
    finally:
        torch.set_num_threads(1)
    for a, b in zip(alone, shared, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(inferred[0], alone[0])


@pytest.mark.parametrize("size", [1, 2, 5, 63, 64])
def test_the_inverse_by_halves_is_that_of_the_triangular_system(size):
    x = torch.randn(3, size, size, generator=torch.Generator().manual_seed(size), dtype=torch.float64) / 4
    torch.testing.assert_close(inverse_by_halves(x.tril(-1)), inverse_of_unit_lower(x))
