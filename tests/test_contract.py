"""What holds for every family with every option, and for every selector; new ones are swept in by themselves."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import slimstate
import tiny
from cases import case, changed, cut
from launching import stock_logits
from slimstate.checkpoints.reader import Checkpoint, described_mixers
from slimstate.core.file_names import PLAN
from slimstate.core.layout import Slot
from slimstate.core.selection import Basis, Selection
from slimstate.core.surgery import Cutter, dropped_channels, outline
from slimstate.families import FAMILIES
from slimstate.families.contract import NOT_NEEDED
from slimstate.models.hooks import masked
from slimstate.models.load import load
from slimstate.models.options import LoadOptions
from slimstate.models.prepare import prepare
from slimstate.models.stock import stock_class
from slimstate.pruning.cut import check_stock_shapes
from slimstate.pruning.evidence import EvidenceCollector, calibration_windows
from slimstate.pruning.options import Calibration
from slimstate.records.plan import Plan
from slimstate.selectors import Case, Request, channel_methods, choose, selector_named
from slimstate.system.errors import SlimstateError
from slimstate.system.progress import Reporter

NAMES = sorted(tiny.VARIANTS)
WITH_KEYS = [name for name in NAMES if name not in tiny.VALUES_ONLY]
INFORMED = sorted(set(channel_methods()) - {"random"})  # nothing that random sees can change its choice
KEY_DIM = 8


def kinds_of(name: str) -> tuple[str, ...]:
    """To leave norms alone, and to cut values as well, is the same for every option of a family."""
    if name in tiny.VALUES_ONLY:
        return ("values",)
    return ("cut", "rescaled", "both") if name in tiny.EVERY_PLAIN else ("cut",)


def half_the_values(folder: Path) -> int | None:
    """Half of the values, or None if they cannot be cut by themselves."""
    checkpoint = Checkpoint.open(folder)
    together = checkpoint.family.one_width or checkpoint.family.value_refusal(checkpoint.config) is not None
    return None if together else checkpoint.mixers[0].value_dim // 2


@pytest.fixture(scope="module")
def cut_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple[Path, Path]]:
    """Every variant saved and cut at random, plain ones without correction too; then run by the stock classes."""
    root = tmp_path_factory.mktemp("contract")
    pairs = {}
    for name in NAMES:
        original = tiny.save(tiny.build(tiny.VARIANTS[name]), root / name)
        for kind in kinds_of(name):
            out, options = root / f"{name}-{kind}", {"keep_norm_eps": kind == "rescaled"}
            if kind in ("both", "values"):
                options = {"value_dim": half_the_values(original), "value_method": "random"}
                if options["value_dim"] is None:
                    continue
            key_dim = None if kind == "values" else KEY_DIM
            slimstate.prune(original, out, method="random", key_dim=key_dim, **options)
            pairs[name, kind] = (original, out)
    torch.save(tiny.token_ids(), root / "ids.pt")
    for words, names, kinds in (
        ((), tiny.OF_FLA, ("cut", "rescaled", "both", "values")),
        (("--without-fla",), tiny.OF_TRANSFORMERS, ("cut", "rescaled", "both")),
        (("--with-fla",), tiny.OF_TRANSFORMERS, ("cut",)),  # other kernels of the same layers
    ):
        cuts = [cut for (name, kind), (_, cut) in pairs.items() if name in names and kind in kinds]
        stock_logits(root / "ids.pt", cuts, *words)
    return pairs


def share_epsilons(model: torch.nn.Module, cut_model: torch.nn.Module, mixers) -> None:
    """Give the norms outside of mixers the epsilon of the cut: most configs have one for all norms."""
    for place, norm in cut_model.named_modules():
        if not any(f"{place}.".startswith(f"{mixer.path}.") for mixer in mixers):
            for name in ("eps", "variance_epsilon"):
                if isinstance(epsilon := getattr(norm, name, None), float):
                    setattr(model.get_submodule(place), name, epsilon)


def masked_logits(model: torch.nn.Module, checkpoint: Checkpoint, plan: Plan, ids: torch.Tensor) -> torch.Tensor:
    with masked(model, checkpoint.mixers, plan.selections, rescaled=not plan.corrected), torch.inference_mode():
        return model(input_ids=ids, use_cache=False).logits


def assert_close(logits: torch.Tensor, expected: torch.Tensor, tolerance: float, method: str = "") -> None:
    spread = {"rtol": tolerance, "atol": tolerance * max(1.0, float(expected.std()))}  # tied embeddings are loud
    torch.testing.assert_close(logits, expected, **spread, msg=lambda text: f"{method} {text}")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name in NAMES for kind in kinds_of(name)])
def test_a_cut_model_in_a_fresh_process_is_the_masked_original(name, kind, cut_folders):
    if (name, kind) not in cut_folders:
        pytest.skip("its values cannot be cut")
    original, folder = cut_folders[name, kind]
    checkpoint, model, ids = Checkpoint.open(original), load(original, device="cpu").model, tiny.token_ids()
    plan, files = Plan.read(folder / PLAN), sorted(folder.glob("logits*.pt"))
    with torch.inference_mode():
        uncut = model(input_ids=ids, use_cache=False).logits
    with_own_epsilons = masked_logits(model, checkpoint, plan, ids)
    share_epsilons(model, load(folder, device="cpu").model, checkpoint.mixers)
    expected = masked_logits(model, checkpoint, plan, ids)
    keeps_epsilon = checkpoint.family.correction(checkpoint.config) == NOT_NEEDED and plan.value_dim is None
    assert len(files) == (1 if name in tiny.OF_FLA or kind != "cut" else 2)
    for file in files:
        assert_close(torch.load(file), expected, 3e-5 if keeps_epsilon else 1e-4)
        assert_close(torch.load(file), with_own_epsilons, 1e-3)  # these random models are small enough to feel them
    assert (uncut - expected).abs().max() > 1e-2  # the mask was felt


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_KEYS)
def test_only_key_channels_change(name, cut_folders):
    original, folder = (Checkpoint.open(path) for path in cut_folders[name, "cut"])
    changed = outline(original.mixers, KEY_DIM)
    assert original.tensors.keys() == folder.tensors.keys()
    for tensor in original.tensors:
        assert changed.touches(tensor) or torch.equal(original.read(tensor), folder.read(tensor))
    assert folder.mixers[0].axis.width == KEY_DIM
    assert [m.layer for m in folder.mixers] == [m.layer for m in original.mixers]
    assert folder.mixers[0].value_dim == (KEY_DIM if original.family.one_width else original.mixers[0].value_dim)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_keeping_all_is_the_identity(name, cut_folders):
    checkpoint = Checkpoint.open(cut_folders[name, kinds_of(name)[0]][0])
    axis = checkpoint.mixers[0].axis
    everything = Selection(keep=torch.arange(axis.width).expand(axis.heads, -1))
    tensors = {tensor: checkpoint.read(tensor) for tensor in checkpoint.tensors}
    same = cut(tensors, checkpoint.mixers, {mixer.layer: everything for mixer in checkpoint.mixers})
    assert all(torch.equal(tensors[tensor], same[tensor]) for tensor in tensors)
    resized = checkpoint.family.resize(checkpoint.config, axis.width)
    assert described_mixers(resized) == checkpoint.mixers


@pytest.mark.slow
@pytest.mark.parametrize("name", tiny.DISTINCT)
def test_a_cut_of_values_alone_is_the_masked_original(name, folders, tmp_path):
    if (value_dim := half_the_values(folders[name])) is None:
        with pytest.raises(SlimstateError, match=r"the values of .* cannot be cut: |one width for keys and values"):
            slimstate.prune(folders[name], value_dim=2, value_method="random")
        return
    slimstate.prune(folders[name], tmp_path / "cut", value_dim=value_dim, value_method="l1")
    before, after = Checkpoint.open(folders[name]), Checkpoint.open(tmp_path / "cut")
    assert (after.mixers[0].axis.width, after.mixers[0].value_dim) == (before.mixers[0].axis.width, value_dim)
    plan, ids = Plan.read(tmp_path / "cut" / PLAN), tiny.token_ids(1, 80)
    model, cut_model = (load(folder, device="cpu").model for folder in (folders[name], tmp_path / "cut"))
    share_epsilons(model, cut_model, before.mixers)
    with torch.inference_mode():
        logits = cut_model(input_ids=ids, use_cache=False).logits
    assert_close(logits, masked_logits(model, before, plan, ids), 1e-4)


@pytest.mark.parametrize("rotated", [False, True])
def test_heads_and_channels_in_two_dimensions_are_cut_as_if_they_lay_in_one(rotated):
    mixer = FAMILIES["delta_net"].mixers({"hidden_size": 12, "num_heads": 2, "use_short_conv": False})[0]
    keep = torch.tensor([[0, 3, 4], [1, 2, 5]])
    basis = torch.linalg.qr(torch.randn(2, 6, 3)).Q.mT.contiguous()
    choice = {0: Basis(rows=basis) if rotated else Selection(keep=keep)}
    flat = torch.randn(12, 7)
    results = []
    for tensor, slot in ((flat, Slot(parameter="u")), (flat.view(2, 6, 7), Slot(parameter="u", by_head=True))):
        one = replace(mixer, axis=replace(mixer.axis, slots=(slot,)), noncommuting=())
        name = one.name_of(slot)
        results.append(cut({name: tensor}, [one], choice)[name])
        assert Cutter([one], choice).shape(name, tensor.shape) == list(results[-1].shape)
    assert torch.equal(results[1], results[0].view(2, 3, 7))


@pytest.mark.slow
@pytest.mark.parametrize("name", tiny.PLAIN)
def test_masking_is_zeroing_the_rows_of_the_projections(name, folders):
    """The way the paper's tables can be had without cutting; SiLU(0) = 0 carries the zeros through the convolution."""
    checkpoint, runtime = Checkpoint.open(folders[name]), load(folders[name], device="cpu")
    axis = checkpoint.mixers[0].axis
    selection = Selection(keep=torch.arange(0, axis.width, 3).expand(axis.heads, -1))
    with torch.inference_mode():
        with masked(runtime.model, checkpoint.mixers, {m.layer: selection for m in checkpoint.mixers}):
            expected = runtime.model(input_ids=tiny.token_ids(), use_cache=False).logits
        for mixer in checkpoint.mixers:
            for slot in (mixer.query, mixer.key):
                rows = axis.rows(slot, dropped_channels(axis.width, selection.keep)).flatten()
                runtime.model.get_parameter(mixer.name_of(slot))[rows] = 0
        found = runtime.model(input_ids=tiny.token_ids(), use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in tiny.EVERY_PLAIN if name in WITH_KEYS])
def test_a_config_that_does_not_fit_the_cut_is_noticed_before_the_cut(name, folders, monkeypatch):
    checkpoint = Checkpoint.open(folders[name])
    check_stock_shapes(checkpoint, KEY_DIM, None, Reporter())
    monkeypatch.setattr(type(checkpoint.family), "resize", lambda family, config, *_: config)
    with pytest.raises(AssertionError, match="where the stock class expects"):
        check_stock_shapes(checkpoint, KEY_DIM, None, Reporter())


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in tiny.EVERY_PLAIN if name in WITH_KEYS])
def test_every_selector_cuts_every_family_to_its_masked_self(name, folders, tmp_path, monkeypatch):
    """All from one calibration. The cuts have the same config, and differ only in the tensors that a cut changes."""
    checkpoint, runtime, ids = Checkpoint.open(folders[name]), load(folders[name], device="cpu"), tiny.token_ids(1, 80)
    (text := tmp_path / "text.txt").write_text(tiny.text(1_000))
    calibration = Calibration(data=str(text), samples=2, length=80, evidence=tmp_path / "evidence.safetensors")
    windows, run = calibration_windows(calibration, tiny.tokenizer()), LoadOptions(device="cpu")
    needs = frozenset.union(*(selector_named(method).needs for method in channel_methods()), {"output"})
    EvidenceCollector(calibration=calibration, windows=windows, run=run, runtime=runtime).collect(checkpoint, needs)
    places = [(mixer, slot) for mixer in checkpoint.mixers for slot in mixer.axis.slots]
    slots, first = {mixer.name_of(slot): mixer.running_name_of(slot) for mixer, slot in places}, None
    changed = outline(checkpoint.mixers, KEY_DIM)
    for method in channel_methods():
        folder = tmp_path / method
        slimstate.prune(folders[name], folder, method=method, key_dim=KEY_DIM, evidence=calibration.evidence)
        plan, after = Plan.read(folder / PLAN), Checkpoint.open(folder)
        if first is None:
            first, small = after, load(folder, device="cpu").model
            running = dict(small.named_parameters()).keys()
            joined = checkpoint.family.one_width or not {*slots.values()} <= running  # when they are loaded
            monkeypatch.setattr("slimstate.workflows.prune.check_stock_shapes", lambda *_: None)  # the same for all
        assert {**after.config, "slimstate": None} == {**first.config, "slimstate": None}
        assert all(changed.touches(part) or torch.equal(after.read(part), first.read(part)) for part in after.tensors)
        if joined:
            small = load(folder, device="cpu").model
        with torch.inference_mode():
            for slot, parameter in () if joined else slots.items():
                small.get_parameter(parameter).copy_(after.read(slot))
            logits = small(input_ids=ids, use_cache=False).logits
        share_epsilons(runtime.model, small, checkpoint.mixers)
        assert_close(logits, masked_logits(runtime.model, checkpoint, plan, ids), 1e-4, method)


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted(channel_methods()))
def test_the_same_seed_gives_the_same_bytes(method, folders, tmp_path):
    (text := tmp_path / "text.txt").write_text(tiny.text(1_000))
    options = {"compression": 0.5, "data": str(text), "samples": 2, "length": 64, "seed": 3}
    for place in "ab":
        slimstate.prune(folders[tiny.PLAIN[0]], tmp_path / place / "cut", method=method, **options)
    first, second = (sorted((tmp_path / place / "cut").rglob("*")) for place in "ab")
    for a, b in zip(first, second, strict=True):
        assert a.name == b.name
        assert a.is_dir() or a.read_bytes() == b.read_bytes()


def kept(method: str, *cases: Case, keep: int = 5, score: str = "kq") -> list[list[list[int]]]:
    return [selection.keep.tolist() for selection in choose(method, cases, Request(keep=keep, score=score))]


@pytest.mark.parametrize("score", ["kq", "k", "q"])
@pytest.mark.parametrize("method", INFORMED)
def test_dead_channels_are_the_ones_dropped(method, score):
    live = [1, 2, 4, 7, 11]
    mask = torch.zeros(12, dtype=torch.float64)
    mask[live] = 1
    assert kept(method, changed(case(), lambda x: x * mask.view(1, -1, 1)), score=score) == [[live] * 3]


@pytest.mark.parametrize("method", INFORMED)
def test_relabelling_channels_relabels_the_choice(method):
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    relabelled = kept(method, changed(case(), lambda x: x[:, order]))[0]
    assert [sorted(order[head].tolist()) for head in relabelled] == kept(method, case())[0]


@pytest.mark.parametrize("scale", [1e-5, 7.0, 1e5])
@pytest.mark.parametrize("method", sorted(channel_methods()))
def test_scaling_the_evidence_changes_nothing(method, scale):
    assert kept(method, changed(case(), lambda x: x * scale)) == kept(method, case())


@pytest.mark.parametrize("method", sorted(channel_methods()))
def test_every_mixer_is_judged_by_itself(method):
    if method != "random":
        assert kept(method, case(seed=1), case(seed=2)) == kept(method, case(seed=1)) + kept(method, case(seed=2))
    together = kept(method, case(seed=1), case(seed=2))
    assert together[0] != together[1]


@pytest.mark.parametrize("method", INFORMED)
def test_keys_and_queries_can_be_judged_apart(method):
    choices = {score: kept(method, case(), score=score)[0] for score in ("kq", "k", "q")}
    assert choices["k"] != choices["q"]


@pytest.mark.parametrize("model_type", ["delta_net", "gated_deltanet"])
def test_convolution_biases_are_cut_with_their_channels(model_type):
    """fla's layers have them, its model configs do not pass them on: so this is one layer, cut and masked."""
    slimstate.prepare_fla()
    from fla.layers import DeltaNet, GatedDeltaNet

    layer_class = {"delta_net": DeltaNet, "gated_deltanet": GatedDeltaNet}[model_type]
    config = {"hidden_size": 48, "num_heads": 2, "num_hidden_layers": 1, "conv_bias": True, "expand_v": 1.0}
    config |= {"expand_k": 0.5} if model_type == "delta_net" else {"head_dim": 12}
    mixer = FAMILIES[model_type].mixers(config)[0]
    torch.manual_seed(0)
    layer = layer_class(**config, layer_idx=0).eval()
    torch.nn.init.normal_(layer.q_conv1d.bias)
    torch.nn.init.normal_(layer.k_conv1d.bias)
    selection = {0: Selection(keep=torch.tensor([[0, 3, 4, 9], [1, 2, 10, 11]]))}
    named = {f"{mixer.path}.{name}": tensor for name, tensor in layer.state_dict().items()}
    small = layer_class(**{**config, **FAMILIES[model_type].resize(config, 4, corrected=False)}, layer_idx=0).eval()
    parts = cut(named, [mixer], selection)
    small.load_state_dict({name.removeprefix(f"{mixer.path}."): part for name, part in parts.items()})
    model = torch.nn.Module()
    model.get_submodule = lambda path: layer  # the layer stands for the whole model
    x = torch.randn(2, 70, 48)
    with torch.inference_mode():
        with masked(model, [mixer], selection, rescaled=True):
            expected = layer(hidden_states=x)[0]
        torch.testing.assert_close(small(hidden_states=x)[0], expected, rtol=1e-4, atol=1e-4)


def test_defaults_are_those_of_the_stock_configs():
    for model_type, family in FAMILIES.items():
        prepare(model_type)
        config_class, _ = stock_class(family)
        stock = config_class.for_model(model_type) if family.library == "fla" else config_class().get_text_config()
        assert {name: getattr(stock, name) for name in family.defaults} == family.defaults
