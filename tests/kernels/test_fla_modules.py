"""The PyTorch kernels do what the model classes ask of fla's: packing, padding, caches, gradients."""

import pytest
import torch
import torch.nn.functional as F

import tiny
from slimstate.checkpoints.reader import described_mixers
from slimstate.kernels import convolution, fla_modules, softmax_attention

pytestmark = pytest.mark.slow
CU_SEQLENS = torch.tensor([0, 7, 8, 20])
NAMES = sorted(tiny.OF_FLA)


def test_convolution_is_a_causal_depthwise_conv1d():
    x, weight, bias = torch.randn(2, 20, 6), torch.randn(6, 4), torch.randn(6)
    y, state = convolution.short_convolution(x, weight, bias, activation="silu", output_final_state=True)
    expected = F.silu(F.conv1d(F.pad(x.mT, (3, 0)), weight.unsqueeze(1), bias, groups=6).mT)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(state, x[:, -4:].mT)


def test_convolution_of_packed_sequences_is_that_of_each():
    x, weight = torch.randn(1, 20, 6), torch.randn(6, 4)
    y, states = convolution.short_convolution(x, weight, cu_seqlens=CU_SEQLENS, output_final_state=True)
    for n, (a, b) in enumerate([(0, 7), (7, 8), (8, 20)]):
        alone, state = convolution.short_convolution(x[:, a:b], weight, output_final_state=True)
        torch.testing.assert_close(y[:, a:b], alone)
        torch.testing.assert_close(states[n : n + 1], state)


def test_convolution_goes_on_from_its_state_in_blocks_and_in_steps():
    x, weight = torch.randn(2, 12, 6), torch.randn(6, 4)
    whole, end = convolution.short_convolution(x, weight, activation="silu", output_final_state=True)
    _, state = convolution.short_convolution(x[:, :5], weight, activation="silu", output_final_state=True)
    rest, _ = convolution.short_convolution(x[:, 5:], weight, activation="silu", initial_state=state)
    torch.testing.assert_close(rest, whole[:, 5:])
    for t in range(5, 12):
        y, state = convolution.convolution_step(x[:, t : t + 1], state, weight=weight, activation="silu")
        torch.testing.assert_close(y, whole[:, t : t + 1])
    torch.testing.assert_close(state, end)


def test_rotation_undone_by_its_conjugate_and_offsets_shift_positions():
    x, angles = torch.randn(2, 10, 3, 8), torch.rand(64, 3)
    rotated = softmax_attention.rotary(x, angles.cos(), angles.sin())
    back = softmax_attention.rotary(rotated, angles.cos(), angles.sin(), conjugate=True)
    torch.testing.assert_close(back, x)
    later = softmax_attention.rotary(x[:, 4:], angles.cos(), angles.sin(), seqlen_offsets=torch.tensor([4, 4]))
    torch.testing.assert_close(later, rotated[:, 4:])
    packed = softmax_attention.rotary(x[:1], angles.cos(), angles.sin(), cu_seqlens=torch.tensor([0, 4, 10]))
    torch.testing.assert_close(packed[:, 4:], softmax_attention.rotary(x[:1, 4:], angles.cos(), angles.sin()))


def test_the_norms_and_the_activation_are_those_of_torch():
    x, residual, weight, bias = torch.randn(2, 3, 8), torch.randn(2, 3, 8), torch.randn(8), torch.randn(8)
    found, total = fla_modules.group_norm(x, weight, bias, residual, prenorm=True, num_groups=4)
    expected = F.group_norm((x + residual).flatten(0, 1), 4, weight, bias).view_as(x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(total, x + residual)
    point = torch.randn(9, requires_grad=True)
    (slope,) = torch.autograd.grad(fla_modules.squared_relu(point).sum(), point)
    torch.testing.assert_close(fla_modules.squared_relu_backward(torch.ones(9), point.detach()), slope)


@pytest.mark.parametrize("window", [(-1, -1), (3, 0)])
def test_attention_masks_the_future_and_the_far_past(window):
    q, k, v = torch.randn(1, 5, 4, 8), torch.randn(1, 9, 2, 8), torch.randn(1, 9, 2, 8)
    o = softmax_attention.attention(q, k, v, causal=True, window_size=window)
    for row in range(5):
        last = row + 4
        seen = slice(0 if window[0] < 0 else max(0, last - window[0]), last + 1)
        keys, values = (x[0, seen].repeat_interleave(2, dim=1) for x in (k, v))
        weights = torch.einsum("hd,thd->ht", q[0, row], keys).div(8**0.5).softmax(-1)
        torch.testing.assert_close(o[0, row], torch.einsum("ht,thd->hd", weights, values), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_every_variant_decodes_with_a_cache_what_it_computes_at_once_and_ignores_padding(name):
    model, ids = tiny.build(tiny.VARIANTS[name]), tiny.token_ids(2, 80)
    mask = torch.ones_like(ids)
    mask[0, :30] = 0
    with torch.inference_mode():
        whole = model(input_ids=ids).logits
        padded = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        alone = model(input_ids=ids[:1, 30:], use_cache=False).logits
        output = model(input_ids=ids[:, :70], use_cache=True)
        steps = [output.logits]
        for t in range(70, 80):
            output = model(input_ids=ids[:, t : t + 1], past_key_values=output.past_key_values, use_cache=True)
            steps.append(output.logits)
    tolerance = 3e-3 if name.startswith("mesa_net") else 1e-3  # its steps start to solve elsewhere
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(padded[:1, 30:], alone, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(padded[1:], whole[1:], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_every_variant_has_the_gradient_that_differences_show(name):
    model, ids = tiny.build(tiny.VARIANTS[name]).double(), tiny.token_ids(1, 80)
    mixer = described_mixers(model.config.to_dict())[0]
    weight = model.get_parameter(mixer.running_name_of(mixer.key))
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    (gradient,) = torch.autograd.grad(loss, [weight])
    direction = gradient / gradient.norm()
    step = 1e-4
    with torch.no_grad():
        losses = []
        for sign in (1, -1):
            weight.add_(sign * step * direction)
            losses.append(model(input_ids=ids, labels=ids, use_cache=False).loss.double())
            weight.sub_(sign * step * direction)
    measured = (losses[0] - losses[1]) / (2 * step)
    assert float(measured) == pytest.approx(float(gradient.norm()), rel=0.02)


def test_generation_runs():
    model, ids = tiny.build(tiny.VARIANTS["delta_net-hybrid"]), tiny.token_ids(2, 10)
    assert model.generate(ids, max_new_tokens=5, do_sample=False).shape == (2, 15)
