"""The paper's propositions that cutting rests on."""

import pytest
import torch
import torch.nn.functional as F

from recurrence_inputs import inputs
from slimstate.core.layout import Axis, Slot
from slimstate.core.selection import Selection
from slimstate.core.surgery import dropped_channels
from slimstate.kernels.convolution import short_convolution
from slimstate.kernels.delta_rule import recurrence


@pytest.mark.parametrize("gated", [False, True])
def test_orthogonal_invariance(gated):
    """(k, q) -> (T k, T q) with T orthogonal leaves the output of the delta rule as it is and rotates the state."""
    (q, k, *rest), _ = inputs(2, 40, 3, 1, 6, 5, gated)
    rotation = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64))[0]
    o, state = recurrence(q, k, *rest, scale=1.0)
    rotated, rotated_state = recurrence(q @ rotation.mT, k @ rotation.mT, *rest, scale=1.0)
    torch.testing.assert_close(rotated, o, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(rotated_state, rotation @ state, rtol=1e-10, atol=1e-10)


def test_axis_aligned_selections_commute_with_depthwise_convolutions():
    """Cutting before the convolution, with its filters cut too, is cutting after it; a rotation is not."""
    x, weight = torch.randn(2, 30, 10, dtype=torch.float64), torch.randn(10, 4, dtype=torch.float64)
    keep = torch.tensor([0, 3, 4, 9])
    after = short_convolution(x, weight, activation="silu")[0][..., keep]
    before = short_convolution(x[..., keep], weight[keep], activation="silu")[0]
    torch.testing.assert_close(before, after)
    rotation = torch.linalg.qr(torch.randn(10, 10, dtype=torch.float64))[0]
    before, after = short_convolution(x @ rotation.mT, weight)[0], short_convolution(x, weight)[0] @ rotation.mT
    assert (before - after).abs().max() > 0.1


def test_zeroed_channels_leave_the_delta_rule_as_removed_ones_do():
    (q, k, v, beta), _ = inputs(2, 40, 2, 1, 8, 5, False)
    keep = [1, 2, 6]
    mask = torch.zeros(8, dtype=torch.float64)
    mask[keep] = 1
    zeroed, _ = recurrence(*(F.normalize(x * mask, dim=-1) for x in (q, k)), v, beta, scale=1.0)
    removed, _ = recurrence(*(F.normalize(x[..., keep], dim=-1) for x in (q, k)), v, beta, scale=1.0)
    torch.testing.assert_close(zeroed, removed, rtol=1e-10, atol=1e-10)


def test_a_slot_finds_rows_in_every_layout():
    """Side by side, fused behind an offset, interleaved with a stride, repeated as blocks and within heads."""
    channels = torch.tensor([[0, 2], [1, 2]])
    layouts = {
        Slot(parameter="q"): [[[0, 2], [4, 5]]],
        Slot(parameter="q", start=6): [[[6, 8], [10, 11]]],
        Slot(parameter="q", start=3, head_stride=10): [[[3, 5], [14, 15]]],
        Slot(parameter="k", copies=2, copy_stride=6): [[[0, 2], [4, 5]], [[6, 8], [10, 11]]],
    }
    for slot, rows in layouts.items():
        assert Axis(heads=2, width=3, slots=(slot,)).rows(slot, channels).tolist() == rows


def test_kept_and_dropped_channels_make_up_the_head():
    selection = Selection(keep=torch.tensor([[0, 2, 5], [1, 2, 3]]))
    assert dropped_channels(6, selection.keep).tolist() == [[1, 3, 4], [0, 4, 5]]


@pytest.mark.parametrize("keep", [[[2, 1]], [[1, 1]], [[-1, 2]], [[]]])
def test_a_selection_that_is_no_ascending_set_is_refused(keep):
    with pytest.raises(ValueError, match="keep"):
        Selection(keep=torch.tensor(keep, dtype=torch.long))
