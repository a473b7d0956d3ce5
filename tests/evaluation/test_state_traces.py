"""Traces of states agree with the stock cache at the same token, and their memory does not grow with the text."""

import gc

import pytest
import torch

import tiny
from slimstate.checkpoints.reader import described_mixers
from slimstate.core.effective_rank import condition_number, effective_rank, rank_utilisation, singular_values
from slimstate.evaluation.state_traces import EDGES, SEGMENT, FinalUtilisation, state_spectrum, trace_states
from slimstate.models.hooks import masked, observed
from slimstate.system.errors import ModelError, PlanError

CASES = [
    "delta_net-plain", "delta_net-sum-norm", "delta_net-hybrid", "gated_deltanet-plain",
    "gated_deltanet-grouped-values", "gated_deltaproduct-ungated",
]  # fmt: skip


def build(name: str):
    model = tiny.build(tiny.VARIANTS[name])
    return tiny.runtime(model), described_mixers(model.config.to_dict())


def stock_state(model: torch.nn.Module, ids: torch.Tensor, layer: int) -> torch.Tensor:
    """Return the state that the stock class caches after these tokens, [B, G, K, V] or its transpose."""
    with torch.inference_mode():
        return model(input_ids=ids, use_cache=True).past_key_values[layer]["recurrent_state"]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_trace_sees_the_states_of_the_stock_cache(name):
    runtime, mixers = build(name)
    ids = tiny.token_ids(2, 40)
    trace = trace_states(runtime, mixers, ids, every=8, skip=16, readings=2)
    assert trace.times == (8, 16, 24, 32, 40)
    counts = torch.zeros(len(EDGES) - 1)
    for i, mixer in enumerate(mixers):
        for n, time in enumerate(trace.times):
            values = singular_values(stock_state(runtime.model, ids[:, :time], mixer.layer))
            torch.testing.assert_close(
                trace.utilisation[i, :, n], rank_utilisation(values).mean(0), rtol=1e-4, atol=1e-6
            )
            if time > 16 and i == 0:
                counts += torch.histc(values[:, 0].clamp_min(1e-8).log10(), len(counts), -8, 3)
    assert trace.histogram.sum().item() == len(mixers) * mixers[0].value_heads * 2 * 3 * trace.capacity
    assert float((trace.histogram[0, 0] - counts).abs().sum()) <= 0.02 * float(counts.sum()) + 2  # at the edges of bins
    assert bool(trace.sampled["holds"].all())
    assert len(trace.sampled["holds"]) == 2 * 2 * len(mixers) * mixers[0].value_heads


def test_the_utilisation_of_each_text_is_that_of_a_trace_of_it_alone():
    runtime, mixers = build("gated_deltanet-plain")
    ids = tiny.token_ids(3, 40)
    alone = [trace_states(runtime, mixers, text[None], every=8, skip=16).utilisation[..., 2:].mean() for text in ids]
    trace = trace_states(runtime, mixers, ids, every=8, skip=16)
    torch.testing.assert_close(trace.by_text, torch.stack(alone), rtol=1e-4, atol=1e-6)


def test_segments_and_strides_do_not_change_a_trace():
    runtime, mixers = build("gated_deltanet-plain")
    ids = tiny.token_ids(1, SEGMENT + 100)
    fine = trace_states(runtime, mixers, ids, every=4, skip=0)
    coarse = trace_states(runtime, mixers, ids, every=48, skip=0)
    shared = [fine.times.index(time) for time in coarse.times]
    torch.testing.assert_close(fine.utilisation[..., shared], coarse.utilisation, rtol=1e-4, atol=1e-6)


def test_observing_a_model_leaves_its_output_alone():
    runtime, mixers = build("gated_deltanet-grouped-values")
    ids, seen = tiny.token_ids(2, 50), []
    with torch.inference_mode():
        before = runtime.model(input_ids=ids).logits
        with observed(runtime.model, mixers, seen.append, every=7):
            during = runtime.model(input_ids=ids).logits
        after = runtime.model(input_ids=ids).logits
    torch.testing.assert_close(during, before, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert [reading.time for reading in seen if reading.mixer.layer == 0] == [7, 14, 21, 28, 35, 42, 49, 50]


def test_the_spectrum_of_a_state_is_that_of_its_singular_values():
    for shape in ((3, 2, 12, 7), (3, 2, 7, 12)):
        state = torch.randn(shape) * torch.logspace(0, -4, shape[-1])
        torch.testing.assert_close(state_spectrum(state), singular_values(state), rtol=1e-4, atol=1e-7)


def test_utilisation_under_a_mask_is_that_of_the_smaller_state():
    from slimstate.core.selection import Selection

    runtime, mixers = build("delta_net-plain")
    keep = torch.arange(0, 24, 3).expand(2, -1)
    dropped = [channel for channel in range(24) if channel % 3]
    selections = {mixer.layer: Selection(keep=keep) for mixer in mixers}
    measured, states = FinalUtilisation(8, windows=1), []

    def add_reading(reading):
        measured.add_reading(reading)
        states.append(reading.state)

    hooks = masked(runtime.model, mixers, selections), observed(runtime.model, mixers, add_reading)
    with hooks[0], hooks[1], torch.inference_mode():
        runtime.model(input_ids=tiny.token_ids(1, 60))
    assert all(bool((state[:, :, dropped] == 0).all()) for state in states)
    expected = torch.stack([rank_utilisation(singular_values(state[:, :, keep[0]])) for state in states]).mean()
    assert measured.mean == pytest.approx(float(expected), rel=1e-4)


def test_memory_does_not_grow_with_the_text(monkeypatch):
    """The tensors alive while states are summed up are as large for eight segments as for two."""
    runtime, mixers = build("delta_net-plain")
    sizes = []
    gc.freeze()  # older tensors do not count

    def weigh(state):
        alive = {x.data_ptr(): x.numel() * x.element_size() for x in gc.get_objects() if type(x) is torch.Tensor}
        sizes.append(sum(alive.values()))
        return state_spectrum(state)

    monkeypatch.setattr("slimstate.evaluation.state_traces.state_spectrum", weigh)

    def most(length):
        sizes.clear()
        trace_states(runtime, mixers, tiny.token_ids(1, length), every=16, skip=0)
        return max(sizes)

    states = SEGMENT // 16 * sum(mixer.state_elements(mixer.axis.width) for mixer in mixers) * 4
    assert most(8 * SEGMENT) - most(2 * SEGMENT) < 0.1 * states
    gc.unfreeze()


def test_bad_options_and_bad_states_are_refused():
    runtime, mixers = build("delta_net-plain")
    ids = tiny.token_ids(1, 40)
    with pytest.raises(PlanError, match="`every` must be at least 1"):
        trace_states(runtime, mixers, ids, every=0)
    with pytest.raises(PlanError, match="`skip` must be at least 0 and less than the 40 tokens"):
        trace_states(runtime, mixers, ids, every=8)
    with torch.no_grad():
        runtime.model.model.layers[1].attn.v_proj.weight[0, 0] = torch.nan
    for readings in (0, 2):
        with pytest.raises(ModelError, match="layer 1: NaN or infinite values in the state"):
            trace_states(runtime, mixers, ids, every=8, skip=0, readings=readings)
    last = FinalUtilisation(key_dim=mixers[0].axis.width, windows=1)
    with pytest.raises(ModelError, match="layer 1"), observed(runtime.model, mixers, last.add_reading), torch.no_grad():
        runtime.model(input_ids=ids)


def test_condition_numbers_of_full_states_are_finite():
    runtime, mixers = build("delta_net-plain")
    ids = tiny.token_ids(1, 200)
    trace = trace_states(runtime, mixers, ids, every=8, skip=0)
    values = singular_values(stock_state(runtime.model, ids, 0))
    assert bool(trace.kappa[..., 0].isinf().all())  # eight tokens cannot fill 24 directions
    torch.testing.assert_close(trace.kappa[0, :, -1], condition_number(values)[0], rtol=1e-2, atol=0)
    assert bool((effective_rank(values) > 1).all())
