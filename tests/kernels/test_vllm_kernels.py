"""vLLM's Triton kernels of the gated delta rule compute our recurrence at every width that a cut may leave.

SLIMSTATE_VLLM names the folder `vllm` of an installed or unpacked wheel (`pip download --no-deps vllm`, then unzip):
none of its code is in this project. Triton's interpreter runs the kernels on a CPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from places import TESTS
from slimstate.kernels.delta_rule import recurrence

VLLM = os.environ.get("SLIMSTATE_VLLM", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not VLLM, reason="SLIMSTATE_VLLM names no folder of an unpacked vLLM wheel"),
]
WIDTHS = (128, 96, 80, 64, 48, 32, 16)


def inputs(width: int) -> dict[str, Tensor]:
    """Of one sequence, over more than a chunk; states are [value heads, value dim, key dim], as vLLM keeps them."""
    tokens, heads, value_heads, value_dim = 70, 1, 2, 32
    generator = torch.Generator().manual_seed(width)

    def draw(*shape: int) -> Tensor:
        return torch.randn(1, *shape, generator=generator)

    return {
        "q": F.normalize(draw(tokens, heads, width), dim=-1),
        "k": F.normalize(draw(tokens, heads, width), dim=-1),
        "v": draw(tokens, value_heads, value_dim),
        "g": F.logsigmoid(draw(tokens, value_heads)),
        "beta": draw(tokens, value_heads).sigmoid(),
        "state": draw(value_heads, value_dim, width),
    }


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, tuple[Tensor, Tensor]]]:
    place = tmp_path_factory.mktemp("vllm")
    torch.save({width: inputs(width) for width in WIDTHS}, place / "inputs.pt")
    script = [str(TESTS / "kernels" / "interpret_vllm.py"), VLLM, str(place / "inputs.pt"), str(place / "outputs.pt")]
    subprocess.run([sys.executable, "-O", *script], check=True)
    return torch.load(place / "outputs.pt")


@pytest.mark.parametrize("kind", ["prefill", "decoding"])
@pytest.mark.parametrize("width", WIDTHS)
def test_a_kernel_of_vllm_is_our_recurrence(width, kind, interpreted):
    given = inputs(width)
    expected, state = recurrence(
        given["q"], given["k"], given["v"], given["beta"], given["g"], scale=width**-0.5, state=given["state"].mT
    )
    found, last = interpreted[width][kind]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(last, state.mT, rtol=1e-4, atol=1e-4)


def test_the_kernels_that_ran_are_those_of_the_wheel():
    assert (Path(VLLM) / "third_party" / "flash_linear_attention" / "ops" / "chunk.py").is_file()
