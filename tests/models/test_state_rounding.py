"""States as an engine's cache keeps them: against a loop over tokens that rounds at the same places."""

import functools
import importlib

import pytest
import torch

import tiny
from slimstate.core.state_dtype import StateRounding, check_state_dtypes
from slimstate.families import family_of
from slimstate.kernels import patches
from slimstate.models.state_rounding import rounded_states
from slimstate.pruning.sizes import state_bytes
from slimstate.system.errors import PlanError

KINDS = ("bfloat16", "float8_e4m3")
ROUNDINGS = [("bfloat16", 1, True), ("bfloat16", 64, False), ("float32", 1, False)]


def naively_rounded(state: torch.Tensor, dtype: str) -> torch.Tensor:
    """Number by number for each head: the nearest of all values that the type has, ties aside."""
    if dtype == "bfloat16":
        bits = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16).double()
    else:
        bits = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    values = bits[bits.isfinite()].unique()
    found = torch.empty_like(state, dtype=torch.float64)
    for place, head in zip(found.flatten(0, 1), state.double().flatten(0, 1), strict=True):
        factor = 1.0 if dtype == "bfloat16" else head.abs().max() / 448
        right = torch.searchsorted(values, head / factor).clamp(1, len(values) - 1)
        low, high = values[right - 1], values[right]
        place.copy_(torch.where(head / factor - low < high - head / factor, low, high) * factor)
    return found


@pytest.mark.parametrize("dtype", KINDS)
def test_a_stored_number_is_the_nearest_that_the_type_has(dtype):
    torch.manual_seed(0)
    state = torch.randn(2, 3, 8, 5) * torch.logspace(-3, 2, 3).view(1, 3, 1, 1)
    stored = StateRounding(dtype=dtype)(state)
    torch.testing.assert_close(stored.double(), naively_rounded(state, dtype), rtol=1e-6, atol=0)
    assert not torch.equal(stored, state)
    torch.testing.assert_close(StateRounding(dtype=dtype)(state.mT).mT, stored)  # either way round
    assert not StateRounding(dtype=dtype)(torch.zeros(1, 2, 4, 4)).any()


def decoded(model, mixers, ids: torch.Tensor, rounding: StateRounding) -> torch.Tensor:
    """Token by token through the model's cache, whose states are rounded by hand after every token."""
    cache, logits = None, []
    for time in range(ids.shape[1]):
        out = model(input_ids=ids[:, time : time + 1], use_cache=True, past_key_values=cache)
        cache = out.past_key_values
        for mixer in mixers:
            state = cache[mixer.layer]["recurrent_state"]
            state.copy_(rounding(state))
        logits.append(out.logits)
    return torch.cat(logits, 1)


@pytest.mark.parametrize(("dtype", "every", "is_slow"), ROUNDINGS)
def test_slow_rounding_is_announced_with_a_faster_way(dtype, every, is_slow):
    advice = StateRounding(dtype=dtype, every=every).advice()
    assert (advice is not None and "`state_every`" in advice) == is_slow


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["delta_net-plain", "gated_deltanet-plain", "kda-plain", "gla-plain"])
@pytest.mark.parametrize("dtype", KINDS)
def test_reading_a_text_is_decoding_it_with_a_cache_in_that_type(variant, dtype):
    """One pass over all tokens with states stored after each, against the stock cache with its states rounded."""
    model = tiny.build(tiny.VARIANTS[variant]).double().eval()  # in float32, states of two passes may round apart
    mixers, ids = family_of(model.config.to_dict()).mixers(model.config.to_dict()), tiny.token_ids(2, 12)
    rounding = StateRounding(dtype=dtype)
    with torch.inference_mode():
        exact = model(input_ids=ids).logits
        with rounded_states(model, mixers, rounding):
            actual = model(input_ids=ids).logits
        expected = decoded(model, mixers, ids, rounding)
    lost = (expected - exact).abs().max()
    assert lost > 1e-4
    assert (actual - expected).abs().max() < 1e-3 * lost


@torch.no_grad()
@pytest.mark.parametrize("every", [1, 3, 64])
def test_a_scan_stores_its_state_after_every_piece_and_reads_outputs_before(every, monkeypatch):
    """The operator of Mamba-2 hybrids against the definition, token by token."""
    model = tiny.build(tiny.VARIANTS["mamba2-plain"]).eval()
    mixers, ids = family_of(model.config.to_dict()).mixers(model.config.to_dict()), tiny.token_ids(1, 10)
    rounding, seen = StateRounding(dtype="bfloat16", every=every), []
    module = importlib.import_module(mixers[0].hook.module)
    original = module.mamba2_chunk_scan

    @functools.wraps(original)
    def noted(*args, **options):
        result = original(*args, **options)
        seen.append((args, options, result))
        return result

    monkeypatch.setattr(module, "mamba2_chunk_scan", noted)
    with rounded_states(model, mixers[:1], rounding):
        model(input_ids=ids)
    pieces = [entry for entry in seen if entry[0][0].shape[1] <= every][: -(-ids.shape[1] // every)]
    left = None
    for args, options, (output, last) in pieces:
        begun = options["initial_states"]
        if left is None:
            assert begun is None or not begun.any()
        else:
            torch.testing.assert_close(begun, naively_rounded(left, "bfloat16").float(), rtol=1e-6, atol=0)
        x, dt, decay, keys, queries = args[:5]
        step = torch.nn.functional.softplus(dt + options["dt_bias"]) if options.get("dt_softplus") else dt
        state = torch.zeros_like(last) if begun is None else begun
        for t in range(x.shape[1]):
            groups = x.shape[2] // keys.shape[2]
            b, c = (each[:, t].repeat_interleave(groups, 1) for each in (keys, queries))
            state = state * (decay * step[:, t]).exp()[..., None, None]
            state = state + (x[:, t] * step[:, t].unsqueeze(-1)).unsqueeze(-1) * b.unsqueeze(-2)
            expected = (state * c.unsqueeze(-2)).sum(-1) + options["D"].unsqueeze(-1) * x[:, t]
            torch.testing.assert_close(output[:, t], expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(last, state, rtol=1e-4, atol=1e-6)
        left = last
    assert left is not None


def test_states_in_float32_change_nothing():
    model = tiny.build(tiny.VARIANTS["delta_net-plain"]).eval()
    mixers, ids = family_of(model.config.to_dict()).mixers(model.config.to_dict()), tiny.token_ids(1, 9)
    with torch.inference_mode(), rounded_states(model, mixers, StateRounding()):
        inside = model(input_ids=ids).logits
    with torch.inference_mode():
        torch.testing.assert_close(model(input_ids=ids).logits, inside, rtol=0, atol=0)


def test_recurrences_run_in_pytorch_where_a_compiled_kernel_would():
    """As on a GPU: the patch stands aside by itself, and not where states have to be seen."""
    patch = patches.Patch("math.sqrt", lambda x: "ours", lambda *_: False)
    assert not patch.runs(2.0)
    with patches.in_pytorch():
        assert patch.runs(2.0)
    assert not patch.runs(2.0)


def test_bytes_of_a_state_are_those_of_its_type():
    mixers = family_of({"model_type": "delta_net"}).mixers({"model_type": "delta_net"})
    width, whole = mixers[0].axis.width, state_bytes(mixers, mixers[0].axis.width)
    assert StateRounding().state_bytes(mixers, width) == whole["fp32"]
    assert StateRounding(dtype="bfloat16").state_bytes(mixers, width // 2) == whole["bf16"] // 2
    scales = 4 * sum(mixer.value_heads for mixer in mixers)
    assert StateRounding(dtype="float8_e4m3").state_bytes(mixers, width) == whole["fp32"] // 4 + scales


def test_what_no_engine_could_mean_is_refused():
    with pytest.raises(PlanError, match=r"unknown `state_dtype` 'int8'"):
        StateRounding(dtype="int8")
    with pytest.raises(PlanError, match="`state_every` must be at least 1"):
        StateRounding(every=0)
    with pytest.raises(PlanError, match="`state_dtypes` must be"):
        check_state_dtypes(("bfloat16", "bfloat16"))
