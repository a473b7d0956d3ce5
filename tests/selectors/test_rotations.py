"""Cuts by a basis: exact where everything commutes with it, best filters where something does not."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import slimstate
import tiny
from cases import case, changed, cut
from launching import stock_logits
from recoveries import logits
from slimstate.checkpoints.reader import Checkpoint
from slimstate.core.evidence import Evidence, EvidenceFile
from slimstate.core.file_names import PLAN
from slimstate.core.layout import Axis, Slot
from slimstate.core.selection import Basis, Selection
from slimstate.core.surgery import Cutter, rotated
from slimstate.families import FAMILIES
from slimstate.kernels.convolution import short_convolution
from slimstate.models.hooks import hooked, masked
from slimstate.models.load import load
from slimstate.pruning.calibration import calibrate
from slimstate.records.plan import Plan
from slimstate.records.schema import ValidationError
from slimstate.selectors import METHODS, Case, Request, choose
from slimstate.selectors.rotations import principal_directions, random_directions
from slimstate.system.errors import PlanError

pytestmark = pytest.mark.slow
ROTATIONS = sorted(name for name, selector in METHODS.items() if selector.rotates)
RELEASED = ("pca-released", "pca-released-adversarial")
BENT = {"method": "random-rotation", "key_dim": 8}
STRAIGHT = {"expand_k": 0.75, "qk_activation": "identity", "use_short_conv": False}
NAMES = [*tiny.PLAIN, "delta_net-elu", "delta_net-relu", "gated_deltanet-grouped-values", "delta_net-hybrid"]
NOT_ORTHOGONAL = [
    torch.ones(1, 2, 4),
    2 * torch.eye(4)[None, :2],
    torch.zeros(1, 1, 4),
    torch.eye(4),
    torch.eye(4).double()[None],
]


def directions(heads: int, keep: int, width: int, seed: int = 0) -> torch.Tensor:
    return random_directions(heads, keep, width, torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory):
    """A model with neither a convolution nor an activation between its projections and its states."""
    variant = tiny.Variant("delta_net-straight", "delta_net", STRAIGHT)
    return tiny.save(tiny.build(variant), tmp_path_factory.mktemp("straight") / "model")


@pytest.mark.parametrize("rows", NOT_ORTHOGONAL)
def test_a_basis_that_is_not_semi_orthogonal_is_refused(rows):
    with pytest.raises(ValueError, match="basis"):
        Basis(rows=rows)


@pytest.mark.parametrize("shape", [(3, 2, 4), (2, 2, 5)])
def test_a_basis_of_another_size_than_the_model_is_refused(shape):
    axis = Axis(heads=2, width=4, slots=(Slot(parameter="q"),))
    with pytest.raises(PlanError, match="does not fit 2 heads of 4"):
        Basis(rows=directions(*shape).float()).check(axis)


def test_a_full_rotation_leaves_a_straight_mixer_as_it_was(straight, tmp_path):
    """K = D, nothing between projections and state but the length of queries and keys, which no rotation changes."""
    record = slimstate.prune(straight, tmp_path / "turned", method="random-rotation", key_dim=24)
    assert record.noncommuting == ()
    before, after = Checkpoint.open(straight), Checkpoint.open(tmp_path / "turned")
    name = before.mixers[0].name_of(before.mixers[0].key)
    assert (before.read(name) - after.read(name)).abs().max() > 0.1
    expected = logits(load(straight, device="cpu").model)
    torch.testing.assert_close(logits(load(tmp_path / "turned", device="cpu").model), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", ROTATIONS)
def test_in_a_straight_mixer_a_cut_projects_queries_and_keys(method, straight, text_file, tmp_path):
    """The oracle turns the activations, not the weights."""
    options = {"data": str(text_file), "samples": 4, "length": 80, "device": "cpu", "keep_norm_eps": True}
    slimstate.prune(straight, tmp_path / "cut", method=method, key_dim=8, **options)
    plan = Plan.read(tmp_path / "cut" / PLAN)
    checkpoint, runtime = Checkpoint.open(straight), load(straight, device="cpu")

    def project(mixer, role, x):
        rows = plan.selections[mixer.layer].rows
        return torch.einsum("bthd,hkd,hke->bthe", x, rows, rows)

    with hooked(runtime.model, checkpoint.mixers, project, scale=8**-0.5):
        expected = logits(runtime.model)
    torch.testing.assert_close(logits(load(tmp_path / "cut", device="cpu").model), expected, rtol=1e-4, atol=1e-4)
    assert (logits(runtime.model) - expected).abs().max() > 1e-2


@pytest.fixture(scope="module")
def rotations(tmp_path_factory):
    """Models cut by a random rotation; one fresh process has left the logits of the stock class in each."""
    root = tmp_path_factory.mktemp("rotated")
    pairs = {name: (tiny.save(tiny.build(tiny.VARIANTS[name]), root / name), root / f"{name}-cut") for name in NAMES}
    for original, out in pairs.values():
        slimstate.prune(original, out, keep_norm_eps=True, **BENT)
    torch.save(tiny.token_ids(), root / "ids.pt")
    stock_logits(root / "ids.pt", [out for _, out in pairs.values()])
    return pairs


@pytest.mark.parametrize("name", NAMES)
def test_masking_by_a_basis_is_the_cut_model_in_a_fresh_process(name, rotations):
    """What a sweep measures is what a cut gives, also where not all commutes with it; the weights come back."""
    original, folder = rotations[name]
    checkpoint, runtime = Checkpoint.open(original), load(original, device="cpu")
    plan, uncut = Plan.read(folder / PLAN), logits(runtime.model)
    with masked(runtime.model, checkpoint.mixers, plan.selections, rescaled=True):
        expected = logits(runtime.model)
    torch.testing.assert_close(torch.load(folder / "logits.pt"), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(logits(runtime.model), uncut)


def test_silu_bends_even_a_full_rotation_and_the_record_says_so(folders, tmp_path):
    record = slimstate.prune(folders[tiny.PLAIN[1]], tmp_path / "turned", method="random-rotation", key_dim=24)
    assert record.noncommuting == ("filters of one channel each", "the activation silu")
    expected = logits(load(folders[tiny.PLAIN[1]], device="cpu").model)
    assert (logits(load(tmp_path / "turned", device="cpu").model) - expected).abs().max() > 0.1
    with pytest.raises(PlanError, match="nothing to cut"):
        slimstate.prune(folders[tiny.PLAIN[1]], tmp_path / "same", method="random", key_dim=24)


def test_a_plan_of_directions_is_read_as_it_was_written(folders, text_file, tmp_path):
    model = folders[tiny.PLAIN[0]]
    options = {"method": "pca", "key_dim": 8, "data": str(text_file), "samples": 4, "length": 64}
    slimstate.prune(model, tmp_path / "cut", **options)
    text, plan = (tmp_path / "cut" / PLAN).read_text(), Plan.read(tmp_path / "cut" / PLAN)
    assert all(isinstance(choice, Basis) and choice.key_dim == 8 for choice in plan.selections.values())
    assert plan.to_json() == json.loads(text)
    assert 0 < plan.summary()["variance_lost"] < 1
    broken = json.loads(text)
    broken["layers"]["0"]["basis"]["float32"] = broken["layers"]["0"]["basis"]["float32"][:-8]
    with pytest.raises(ValidationError, match=r"layers\.0"):
        Plan.from_json(broken)


def test_a_selection_is_the_basis_of_its_axes(folders):
    checkpoint = Checkpoint.open(folders[tiny.PLAIN[0]])
    tensors = {name: checkpoint.read(name) for name in checkpoint.tensors}
    keep = torch.tensor([[0, 3, 7], [1, 2, 20]])
    rows = F.one_hot(keep, checkpoint.mixers[0].axis.width).float()
    layers = [mixer.layer for mixer in checkpoint.mixers]
    by_channels = cut(tensors, checkpoint.mixers, dict.fromkeys(layers, Selection(keep=keep)))
    by_axes = cut(tensors, checkpoint.mixers, dict.fromkeys(layers, Basis(rows=rows)))
    assert all(torch.equal(by_channels[name], by_axes[name]) for name in tensors)


@pytest.mark.parametrize("score", ["k", "q", "kq"])
def test_principal_components_are_the_singular_vectors_of_the_activations(score):
    """Against NumPy's SVD of the activations themselves, stacked, not centred."""
    generator = torch.Generator().manual_seed(1)
    scales = torch.linspace(3, 0.2, 7, dtype=torch.float64)
    queries, keys = (torch.randn(2, 90, 7, generator=generator, dtype=torch.float64) * scales + 1 for _ in "qk")
    evidence = Evidence(tokens=90, query_gram=queries.mT @ queries, key_gram=keys.mT @ keys)
    given = Case(heads=2, width=7, evidence=evidence)
    (basis,) = choose("pca", [given], Request(keep=3, score=score))
    (worst,) = choose("pca-adversarial", [given], Request(keep=3, score=score))
    stacked = {"k": keys, "q": queries, "kq": torch.cat([queries, keys], dim=1)}[score]
    for head in range(2):
        _, sizes, vectors = np.linalg.svd(stacked[head].numpy(), full_matrices=False)
        for found, expected in ((basis, vectors[:3]), (worst, vectors[-3:])):
            rows = found.rows[head].double().numpy()
            np.testing.assert_allclose(rows.T @ rows, expected.T @ expected, atol=1e-5)
        lost = (sizes[3:] ** 2).sum() / (sizes**2).sum()
        assert basis.certificate["variance_lost"][head] == pytest.approx(lost, rel=1e-6)


@pytest.mark.parametrize("score", ["k", "q", "kq"])
@pytest.mark.parametrize("name", tiny.PLAIN)
def test_principal_components_as_released_are_those_of_normalised_centred_activations(name, score, folders):
    """Against NumPy's covariance of the activations of a running model, each divided by its length."""
    runtime, mixers = load(folders[name], device="cpu"), Checkpoint.open(folders[name]).mixers
    seen: dict[tuple[int, str], list[torch.Tensor]] = {}

    def see(mixer, role, x):
        seen.setdefault((mixer.layer, role), []).append(F.normalize(x.double(), dim=-1).flatten(0, 1))
        return x

    with hooked(runtime.model, mixers, see):
        logits(runtime.model)
    evidence = calibrate(runtime, mixers, tiny.token_ids(), frozenset({"moments"}))
    axes = [(mixer.axis, evidence[mixer.layer]) for mixer in mixers]
    cases = [Case(heads=axis.heads, width=axis.width, evidence=sums) for axis, sums in axes]
    best, worst = (choose(method, cases, Request(keep=5, score=score)) for method in RELEASED)
    for place, mixer in enumerate(mixers):
        roles = {"k": ("key",), "q": ("query",), "kq": ("query", "key")}[score]
        rows = torch.cat([torch.cat(seen[mixer.layer, role]) for role in roles])
        for head in range(mixer.axis.heads):
            values, vectors = np.linalg.eigh(np.cov(rows[:, head].numpy(), rowvar=False))
            for found, expected in ((best, vectors[:, -5:]), (worst, vectors[:, :5])):
                kept = found[place].rows[head].double().numpy()
                np.testing.assert_allclose(kept.T @ kept, expected @ expected.T, atol=2e-4)
            lost = best[place].certificate["variance_lost"][head]
            assert lost == pytest.approx(values[:-5].sum() / values.sum(), rel=1e-3)


def test_as_released_a_mean_and_lengths_are_no_variance():
    """Keys that all but share one large mean, some of them a thousand times as long: pca keeps these, this does not."""
    generator = torch.Generator().manual_seed(3)
    keys = 0.01 * torch.randn(1, 400, 6, generator=generator, dtype=torch.float64)
    keys[..., 1] *= 20
    keys[..., 0] += 1
    keys[:, ::7] *= 1000
    longer = F.pad(F.normalize(keys, dim=-1), (0, 1), value=1.0)
    gram = keys.mT @ keys
    evidence = Evidence(tokens=400, key_gram=gram, query_gram=gram, key_moments=longer.mT @ longer)
    given = Case(heads=1, width=6, evidence=evidence)
    (plain,), (released,) = (choose(name, [given], Request(keep=1, score="k")) for name in ("pca", RELEASED[0]))
    assert int(plain.rows[0, 0].abs().argmax()) == 0
    assert int(released.rows[0, 0].abs().argmax()) == 1


def test_evidence_without_moments_is_extended_by_them_and_kept(folders, text_file, tmp_path):
    """Other methods do not pay for them, and a file written for those is read."""
    model, text = folders[tiny.PLAIN[0]], {"data": str(text_file), "samples": 4, "length": 64}
    path = tmp_path / "evidence.safetensors"
    slimstate.prune(model, tmp_path / "a", method="pca", key_dim=8, evidence=path, **text)
    assert EvidenceFile.open(path).missing(frozenset({"gram", "moments"})) == {"moments"}
    slimstate.prune(model, tmp_path / "b", method=RELEASED[0], key_dim=8, evidence=path, **text)
    assert EvidenceFile.open(path).missing(frozenset({"gram", "moments"})) == frozenset()
    slimstate.prune(model, tmp_path / "c", method=RELEASED[1], key_dim=8, evidence=path)  # no text: nothing runs
    rows = {name: Plan.read(tmp_path / name / PLAN).selections[0].rows for name in "abc"}
    assert (rows["a"] @ rows["a"].mT - rows["b"] @ rows["a"].mT).abs().max() > 1e-3
    assert (rows["b"] @ rows["c"].mT).abs().max() < 1e-4  # 8 of 24 best and 8 of 24 worst


def test_no_other_directions_keep_more_variance():
    given = case(heads=2, width=6)
    gram = given.evidence.key_gram

    def kept(rows):
        return (rows @ gram @ rows.mT).diagonal(dim1=-2, dim2=-1).sum(-1)

    best, _ = principal_directions(gram, 3)
    least, _ = principal_directions(gram, 3, least=True)
    for seed in range(300):
        other = kept(directions(2, 3, 6, seed))
        assert (other <= kept(best) + 1e-9).all()
        assert (other >= kept(least) - 1e-9).all()


def test_the_adapted_filters_are_the_best_of_least_squares():
    """Brute force: of all filters of one channel each, the ones that fit T (W * x) best on the turned signal.

    The turned channels are uncorrelated and white in time, as the proposition assumes.
    """
    width, taps, time = 5, 3, 4000
    generator = torch.Generator().manual_seed(0)
    turn = directions(1, width, width)[0]
    weight = torch.randn(width, taps, generator=generator, dtype=torch.float64)
    energy = torch.tensor([3.0, 2.0, 1.0, 0.5, 0.2], dtype=torch.float64)
    steps = (torch.randn(time, width, generator=generator, dtype=torch.float64) * energy).T
    lagged = torch.cat([torch.roll(steps, lag, dims=1) for lag in range(taps)])
    whitened = torch.linalg.qr(lagged.T)[0].T[: width * taps] * lagged.norm(dim=1, keepdim=True)
    x = (turn.T @ whitened.view(taps, width, time)).flip(0)  # what each tap sees, in the channels as they were
    target = turn @ torch.einsum("cw,wct->ct", weight, x)
    best = torch.empty(width, taps, dtype=torch.float64)
    for channel in range(width):
        seen = (turn[channel] @ x).T
        best[channel] = torch.linalg.lstsq(seen, target[channel].unsqueeze(-1)).solution.squeeze(-1)
    axis = Axis(heads=1, width=width, slots=(Slot(parameter="conv", depthwise=True),))
    found = rotated(axis, axis.slots[0], Basis(rows=turn[None].float()), weight)
    torch.testing.assert_close(found, best, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found, turn.square() @ weight, rtol=1e-5, atol=1e-5)


def test_a_filter_that_all_channels_share_is_left_alone_and_commutes():
    """The lemma of shared convolutions; it ends at the activation behind them."""
    turn = directions(1, 3, 6)
    weight = torch.randn(4, dtype=torch.float64).expand(6, 4).contiguous()
    axis = Axis(heads=1, width=6, slots=(Slot(parameter="conv", depthwise=True),))
    after = rotated(axis, axis.slots[0], Basis(rows=turn.float()), weight)[:3]
    torch.testing.assert_close(after, weight[:3], rtol=1e-6, atol=1e-6)
    x = torch.randn(2, 30, 6, dtype=torch.float64)
    before, behind = x @ turn[0].mT, short_convolution(x, weight)[0] @ turn[0].mT
    torch.testing.assert_close(short_convolution(before, weight[:3])[0], behind)
    bent = short_convolution(x, weight, activation="silu")[0] @ turn[0].mT
    assert (short_convolution(before, weight[:3], activation="silu")[0] - bent).abs().max() > 0.1


def test_rows_of_every_layout_are_rotated_and_their_neighbours_left_alone():
    basis = Basis(rows=directions(2, 2, 3).float())
    rows, wide = torch.randn(25, 4), basis.rows.double()
    for slot in (Slot(parameter="q", start=3, head_stride=10), Slot(parameter="k", copies=2, copy_stride=6)):
        axis = Axis(heads=2, width=3, slots=(slot,))
        found, places = rotated(axis, slot, basis, rows), axis.all_rows(slot)
        for copy in range(slot.copies):
            for head in range(2):
                mine = places[copy, head]
                expected = torch.cat([wide[head] @ rows[mine].double(), torch.zeros(1, 4)]).float()
                torch.testing.assert_close(found[mine], expected)
        others = torch.ones(25, dtype=torch.bool)
        others[places.flatten()] = False
        assert torch.equal(found[others], rows[others])


def test_pca_looks_past_dead_channels_and_past_scale():
    mask = torch.zeros(12, dtype=torch.float64)
    mask[[1, 2, 4, 7, 11]] = 1
    (basis,) = choose("pca", [changed(case(), lambda x: x * mask.view(1, -1, 1))], Request(keep=5))
    assert basis.rows[..., mask == 0].abs().max() < 1e-5
    (same,) = choose("pca", [changed(case(), lambda x: x * 1e4)], Request(keep=5))
    (first,) = choose("pca", [case()], Request(keep=5))
    torch.testing.assert_close(same.rows, first.rows)


def test_random_directions_depend_on_the_seed_alone():
    given = [case(), case(seed=5)]
    first, again, other = (choose("random-rotation", given, Request(keep=5, seed=seed)) for seed in (3, 3, 4))
    assert all(torch.equal(a.rows, b.rows) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0].rows, first[1].rows)
    assert not torch.equal(first[0].rows, other[0].rows)


def test_a_sweep_of_rotations_measures_what_cuts_give(folders, text_file, tmp_path):
    model, out = folders[tiny.PLAIN[0]], tmp_path / "sweep"
    methods, measure = ("drrqr", *ROTATIONS), {"text": text_file, "text_length": 96, "max_tokens": 384}
    grid = {"methods": methods, "compressions": (0.33,), "scores": ("kq", "k")}
    record = slimstate.sweep(model, out, data=text_file, samples=4, length=64, **grid, **measure)
    rows = {(row.method, row.score): row for row in record.rows}
    assert set(rows) == {(m, s) for m in methods for s in ("kq", "k")} - {("random-rotation", "k")}
    slimstate.prune(model, tmp_path / "cut", method="pca", key_dim=16, score="k", evidence=out / "evidence.safetensors")
    measured = slimstate.evaluate(tmp_path / "cut", text_file, length=96, max_tokens=384)
    assert measured.nats_per_token == pytest.approx(rows["pca", "k"].nats_per_token, rel=2e-3)
    gram = EvidenceFile.open(out / "evidence.safetensors").evidence[0].key_gram
    kappas = torch.linalg.eigvalsh(gram)[:, [-1, 8]]  # the least that 16 of 24 components keep
    plan = json.loads((tmp_path / "cut" / PLAN).read_text())
    expected = (kappas[:, 0] / kappas[:, 1]).sqrt()
    actual = torch.tensor(plan["layers"]["0"]["condition_after"]).double()
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=0)
    assert "PCA (adv.)" in (out / "sweep.md").read_text()
    assert slimstate.report(tmp_path).records == {"sweep": 1, "plan": 1}
    page = (tmp_path / "report.html").read_text()
    assert "directions kept in every head" in page
    assert "was skipped" not in page


def test_a_model_whose_channels_cannot_be_rotated_is_refused(folders, text_file, tmp_path, monkeypatch):
    """A family that does not say what a rotation passes; before anything is calibrated."""
    model = folders[tiny.PLAIN[0]]
    mixers = tuple(replace(mixer, noncommuting=None) for mixer in Checkpoint.open(model).mixers)
    monkeypatch.setattr(type(FAMILIES["delta_net"]), "mixers", lambda family, config: mixers)
    text = {"data": str(text_file), "samples": 4, "length": 64}
    refused = "pca rotates channels, and those of delta_net cannot be rotated; use one of random, l1"
    with pytest.raises(PlanError, match=refused):
        slimstate.prune(model, tmp_path / "cut", method="pca", key_dim=8, evidence=tmp_path / "evidence", **text)
    with pytest.raises(PlanError, match=refused):
        slimstate.sweep(model, tmp_path / "sweep", text=text_file, methods=("l1", "pca"), **text)
    assert not list(tmp_path.iterdir())
    with pytest.raises(PlanError, match="cannot be rotated, only chosen"):
        Cutter(mixers, {mixer.layer: Basis(rows=directions(2, 8, 24).float()) for mixer in mixers})
