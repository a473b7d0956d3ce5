"""Products of experts follow autocast, as all other products do."""

import pytest
import torch
from transformers.integrations import moe

from slimstate.kernels.experts import follow_autocast


@pytest.mark.parametrize(("columns", "dtype"), [(16, torch.bfloat16), (12, torch.float32)])
def test_experts_compute_in_the_dtype_of_autocast_where_rows_are_aligned(columns, dtype):
    follow_autocast()
    torch.manual_seed(0)
    rows, ends = torch.randn(10, 8), torch.tensor([4, 4, 10], dtype=torch.int32)
    weight = torch.randn(3, 8, columns, requires_grad=True)
    plain = torch.cat([rows[:4] @ weight[0], rows[4:] @ weight[2]])
    torch.testing.assert_close(moe._grouped_mm(rows, weight, ends), plain)
    with torch.autocast("cpu", torch.bfloat16):
        product = moe._grouped_mm(rows, weight, ends)
        expected = torch.cat([rows[:4] @ weight[0], rows[4:] @ weight[2]])
    assert product.dtype == dtype
    torch.testing.assert_close(product.float(), (expected if dtype == torch.bfloat16 else plain).float())
    product.float().square().sum().backward()
    assert weight.grad[0].any()
    assert not weight.grad[1].any()
