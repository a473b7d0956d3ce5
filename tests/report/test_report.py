"""The report: from records alone, one page that stands by itself, whatever the records hold or lack."""

import html
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="figures need matplotlib: pip install 'slimstate[report]'")

from sample_records import FILES, FOLDER, PLAN_FILE, Record, all_records, large_trace, sample, write

from slimstate.core.file_names import PLAN
from slimstate.records.evaluation import SweepRecord
from slimstate.records.folder import read_records
from slimstate.records.numbers import fixed
from slimstate.records.states import TraceRecord
from slimstate.records.training import ReconstructionRecord, RecoveryRecord
from slimstate.reports import tables
from slimstate.reports.page import unique_records
from slimstate.reports.plots import style as plot_style
from slimstate.reports.plots.results import pareto
from slimstate.reports.plots.states import MAX_STATES, retrieval, utilisation_curves
from slimstate.reports.provenance import redirect_outputs
from slimstate.reports.sections import Scale, strip_path
from slimstate.system.errors import DataError, OutputError
from slimstate.system.progress import Reporter
from slimstate.workflows.report import report

pytestmark = pytest.mark.slow
write_report = partial(report, progress=False)
SECTIONS = ("cut", "evaluation", "filters", "recovery", "reconstruction", "trade-off", "states", "states", "serving")
FULL, MIXERS, NORMS = (
    {"length": 64, "batch_size": 4, "adaptation": {"full": full, "mixers": mixers}, "unfreeze": unfreeze}
    for full, mixers, unfreeze in ((True, None, None), (False, 3, None), (False, None, "norms,biases"))
)
MORE_THAN_ALL = {"tokens": 128, "nats": {"before": 4.5, "after": 3.9, "uncut": 4.0}, "closed": {"uncut": 1.2}}
FLA, STOCK = ({"library": library, "name": "AutoModelForImageTextToText"} for library in ("fla", "transformers"))


@pytest.fixture
def unpainted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Build figures without painting them, which is what takes the time."""
    monkeypatch.setattr(plot_style, "svg", lambda figure, prefix: f'<svg><g id="{prefix}-figure_1"/></svg>')


@pytest.fixture(scope="module")
def whole_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(write_report(FOLDER, tmp_path_factory.mktemp("page") / "report.html").out)


def readable(page: str) -> str:
    """Return what a person reads of a page, on one line."""
    page = re.sub(r"<(style|script)>.*?</\1>", "", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page)).split())


def page_text(folder: Path, records: dict[str, Record]) -> str:
    return readable(Path(write_report(write(folder, records)).out).read_text())


def test_the_result_names_the_page_and_counts_the_records(tmp_path, unpainted):
    page = tmp_path / "out" / "page.html"
    report = write_report(write(tmp_path, all_records()), page)
    kinds = ("sweep", "filters", "evaluation", "plan", "reconstruction", "recovery", "verification")
    counts = {"trace": 2, **dict.fromkeys(kinds, 1)}
    assert report.to_json() == {"out": str(page), "records": counts, "skipped": [], "bytes": page.stat().st_size}
    assert [path.name for path in page.parent.iterdir()] == ["page.html"]


def test_every_section_shows_the_numbers_of_its_records(whole_page):
    text = readable(whole_page.read_text())
    for words in (
        "State, MiB 2.00 → 1.00",
        "Perplexity per word 110.00 → 400.00 20.00 → 60.00 per token",
        "perplexity 20.00 per token, 110.00 per word, 1.125 bits per byte",
        "by lm-eval's wikitext, as in the paper: 4,096 tokens, 10,240 bytes; word perplexity over 2,048 words of",
        "random recommended kq 50% 4 1.00 60.00 400.00 1.2500",
        "4 of 8 channels kept in every head, 50% less state",
        "largest rho 1.23 after 7 swaps; largest condition number of a head's keys 5,000 → 300",
        "Recommended random at key dim 4: 50% less state",
        "Perplexity by score.",
        "None of 32 sampled states is outside the theoretical bounds.",
        "query 0.100, key 0.100",
        "reconstructed (drrqr, 4 of 8) 192 tokens 30 2 of 2 0.2000 0.1000 0.2500 0.2000 20%",
        "recovered (drrqr, 4 of 8) 25,600 adapters, convolutions 4.5000 4.2000 4.0000 3.9000 50.0%",
        "lambada_openai acc ↑ 0.400 ± 0.012 0.500 ± 0.012 80.0%",
        "vllm 5.1 slim (drrqr, 4 of 8) differs 1.2e-04 – 5 of 6",
        "vllm 5.1 base/model refuses – – – no such kernel",
        "slimstate prune base/model --out again/SLIM --method random --key-dim 4",
        "from transformers import AutoModelForCausalLM",
        "2.13.0",
        "trace-slim.json",
    ):
        assert words in text, words


def test_the_same_records_give_the_same_bytes(whole_page, tmp_path):
    again = write_report(FOLDER, tmp_path / "again.html")
    assert Path(again.out).read_bytes() == whole_page.read_bytes()


def test_commands_appear_once_and_in_order(whole_page):
    listing = re.search(r'<div class="listing commands">.*?</div>', whole_page.read_text(), re.DOTALL)[0]
    lines = [" ".join(re.sub("<[^>]*>", "", line).split()) for line in listing.split("\n")]
    names = [line.removeprefix("Copy").split()[1] for line in lines]
    assert names == ["sweep", "prune", "prune", "reconstruct", "recover", "analyze", "analyze", "eval", "verify"]
    assert f"--apply {FOLDER / PLAN_FILE}" in lines[2]


def test_repeated_commands_write_to_their_own_places():
    commands = {
        "slimstate prune m --apply a/plan --out a/slim": "slimstate prune m --apply a/plan --out again/slim",
        "slimstate prune m --apply b/plan --out b/slim": "slimstate prune m --apply b/plan --out again/slim-2",
        "slimstate eval m --out /far/away/record.json": "slimstate eval m --out again/record.json",
        "slimstate eval n --out record.json": "slimstate eval n --out again/record-2.json",
        **{line: line for line in ("slimstate eval m --text t", "an 'open quote --out x", "slimstate eval m --out")},
    }
    assert redirect_outputs([*commands, *commands]) == [*commands.values()]


def test_the_page_of_a_cut_alone_names_the_commands_that_add_more(tmp_path, unpainted):
    text = page_text(tmp_path, {"slim/config.json": {}, f"slim/{PLAN}": sample(PLAN_FILE)})
    for words in (
        "Not on this page There are no records of the cost of the cut, compared with the uncut model; how much of",
        f"slimstate eval {tmp_path / 'slim'} --baseline base/model --text TEXT --out {tmp_path / 'evaluation.json'}",
        f"slimstate analyze base/model {tmp_path / 'slim'} --text TEXT",
        "slimstate sweep base/model --data TEXT --text OTHER_TEXT",
    ):
        assert words in text, words
    assert "Not on this page" not in page_text(tmp_path / "all", all_records())


def test_the_page_of_a_training_names_commands_for_the_model_that_it_wrote(tmp_path, unpainted):
    training = json.loads((FOLDER.parent.parent / "records/examples/training.json").read_text())
    text = page_text(tmp_path, {"training.json": training | {"model": "delta_net-5m", "out": "trained"}})
    assert "slimstate sweep trained --data TEXT" in text
    assert "sweep delta_net-5m" not in text


def test_records_beside_the_weights_of_a_model_are_on_the_page_and_their_copies_in_its_cuts_are_not(tmp_path):
    scores = {"kind": "evaluation", "format": 1, **sample("evaluation.json")}
    for name in ("model", "slim"):
        write(tmp_path, {f"{name}/config.json": {}, f"{name}/scores.json": scores})
        (tmp_path / name / "tokenizer.json").write_text('{"version": "1.0", "kind": "evaluation"}')
    records = read_records(tmp_path)
    assert (records.counts(), records.skipped) == ({"evaluation": 1}, ())


def test_utilisation_comes_from_traces_and_a_note_gives_that_of_the_sweep(tmp_path, unpainted):
    records = {name: sample(name) for name in ("sweep.json", "trace-model.json", "trace-slim.json")}
    sweep, model, slim = records.values()
    model["fingerprint"] = slim["cut"]["base_fingerprint"] = sweep["settings"]["fingerprint"]
    slim["cut"]["method"] = sweep["rows"][0]["method"]
    means = [fixed(sum(map(sum, trace["utilisation_by_head"])) / 4, 3) for trace in (model, slim)]
    text = page_text(tmp_path, records)
    assert f"model (uncut) {fixed(sweep['uncut']['rank_utilisation'], 3)}, here {means[0]}" in text
    assert f"State in use {means[0]} → {means[1]} rank utilisation over a text" in text
    slim["cut"]["base_fingerprint"] = "sha256:another"
    assert "rank utilisation at the end of windows" in page_text(tmp_path, records), "a cut of another model"


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("evaluation.json", {"tokens": 8192}, "Few tokens Measured on 8,192 tokens: the values of “retained” may be"),
        ("evaluation.json", {"tokens": 200_000}, "– How often the model recalls"),
        ("recovery.json", {"settings": FULL}, "25,600 all weights 4.5000"),
        ("recovery.json", {"settings": MIXERS}, "25,600 mixers 4.5000"),
        ("recovery.json", {"settings": NORMS}, "25,600 adapters, convolutions, norms, biases 4.5000"),
        ("recovery.json", {"measured": MORE_THAN_ALL}, "4.5000 3.9000 4.0000 – −0.100 nats per token"),
        (PLAN_FILE, {}, "2 layers, 2 key heads each"),
        ("sweep.json", {"recommended": None}, "This sweep is not finished and recommends nothing yet"),
        ("sweep.json", {"recommended": None}, "2.00 per sequence in fp32, uncut"),
        ("sweep.json", {"loader": None}, "Load the result Copy import fla"),
        ("sweep.json", {"loader": FLA}, "architecture from transformers import AutoModelForImageTextToText"),
        ("sweep.json", {"loader": STOCK}, "Load the result Copy from transformers import AutoModelForImageTextToText"),
    ],
)
def test_a_page_says_what_is_special_about_a_record(tmp_path, unpainted, name, change, words):
    assert words in page_text(tmp_path, {name: sample(name, **change)})


def test_several_records_of_a_kind_each_have_their_place(tmp_path, unpainted):
    other_text = {**sample("trace-model.json")["text"], "digest": "sha256:other"}
    records = {
        "trace-a.json": sample("trace-model.json", name="a"),
        "trace-b.json": sample("trace-slim.json", name="b"),
        "trace-c.json": sample("trace-model.json", name="c", text=other_text),
        "one.json": sample("evaluation.json", name="one"),
        "two.json": sample("evaluation.json", name="two"),
    }
    for model in ("first/model", "second/model"):
        records[f"{model}/sweep.json"] = sample("sweep.json", model=model)
        records[f"{model}/{PLAN}"] = sample(PLAN_FILE, model={"source": model})
    page = Path(write_report(write(tmp_path, records)).out).read_text()
    headings = [readable(heading) for heading in re.findall(r"<h3>.*?</h3>", page, re.DOTALL)]
    assert {"a, b", "c"} <= set(headings)
    assert sum(heading.startswith(("one (drrqr", "two (drrqr")) for heading in headings) == 2
    for model in ("first/model", "second/model"):
        assert f"{model}: key dim 8 → 4" in headings
        assert any(heading.startswith(f"{model} /") for heading in headings)
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert len(ids) == len(set(ids))


def test_records_of_benchmarks_and_trainings_and_every_model_of_a_comparison_are_shown(tmp_path, unpainted):
    examples = Path(__file__).parent.parent / "records" / "examples"
    names = ("bench-mixer.json", "bench-model.json", "bench-decode.json", "training.json")
    records = {name: json.loads((examples / name).read_text()) for name in names}
    values = {"value_dim": 6, "value_width": 8, "value_method": "l1", "reconstructed": [{}], "recovered": [{}]}
    cut = {**sample("evaluation.json")["cut"], **values}
    records |= {"one.json": sample("evaluation.json"), "two.json": sample("evaluation.json", name="again", cut=cut)}
    text = page_text(tmp_path, records)
    row = records["bench-mixer.json"]["rows"][1]
    assert f"model delta_net, key dim 4, mode forward {1000 * row['seconds']:.3f} ± 0.000" in text
    assert "Mixer on" in text and "Decode on" in text  # noqa: PT018
    assert f"{records['training.json']['measured']['nats']['after']:.4f}" in text
    for label in ("slim (drrqr, 4 of 8)", "again (drrqr, 4 x 6 of 8 x 8, reconstructed, recovered)"):
        assert f"Perplexity per token 20.00 → 25.00 {label}" in text
        assert f"Associative recall 0.300 → 0.300 {label}" in text


@pytest.mark.parametrize("record", [ReconstructionRecord.FILE, RecoveryRecord.FILE])
def test_the_copied_plan_of_a_trained_model_is_shown_once(tmp_path, record):
    folder = write(tmp_path, {f"{name}/{PLAN}": sample(PLAN_FILE) for name in ("slim", "trained")})
    write(folder, {f"trained/{record}": {}})
    assert [file.path.parent.name for file in unique_records(folder).plan] == ["slim"]
    shutil.rmtree(folder / "slim")
    assert [file.path.parent.name for file in unique_records(folder).plan] == ["trained"]


@pytest.mark.parametrize(("name", "section"), zip(FILES, SECTIONS, strict=True))
def test_a_page_has_the_sections_that_it_has_records_for(tmp_path, unpainted, name, section):
    page = Path(write_report(write(tmp_path, {name: sample(name)})).out).read_text()
    assert re.findall(r'<section id="([^"]*)"', page) == [section, "reproduce"]
    assert re.findall(r'<a href="#([^"]*)"', page) == [section, "reproduce", "records"]


def places(tree: Any):
    """Yield every place in a record as a container and a key; the first item of a list stands for all."""
    for key, value in list(tree.items() if isinstance(tree, dict) else enumerate(tree[:1])):
        yield tree, key
        if isinstance(value, (dict, list)):
            yield from places(value)


def test_everything_from_a_record_is_escaped(tmp_path):
    evil = '<b onclick="x">$&amp;^_{$</b><script>alert(1)</script>'
    records = all_records()
    for record in records.values():
        for inner, key in places(record):
            inner[key] = evil if isinstance(inner[key], str) and key not in ("kind", "verdict") else inner[key]
        record["versions"] = {evil: evil}
    for inner in (records["evaluation.json"]["lm_eval"]["tasks"], records["filters-model.json"]["filters"]["0"]):
        inner[evil] = inner.pop(next(iter(inner)))
    records["filters-model.json"]["filters"] = {evil: records["filters-model.json"]["filters"]["0"]}
    records[PLAN_FILE]["correction"] = records["recovery.json"]["settings"]["unfreeze"] = evil
    report = write_report(write(tmp_path, records))
    page = Path(report.out).read_text()
    assert report.skipped == ()
    assert "<b " not in page
    assert page.count("<script") == 1
    assert page.count("&lt;script&gt;alert(1)") > 100


def test_an_empty_folder_is_refused_with_the_commands_that_write_records(tmp_path):
    with pytest.raises(DataError, match=r"no record under .*sweep.*analyze.*eval.*prune") as caught:
        write_report(tmp_path)
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match="no folder"):
        write_report(tmp_path / "nowhere")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "sweep.json").write_text('{"kind": "sweep"}')
    with pytest.raises(DataError, match=r"no record under .* that can be read: .*sweep\.json was skipped"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_files_that_cannot_be_read_are_skipped_and_named(tmp_path, unpainted, monkeypatch):
    lines: list[str] = []
    reporter = Reporter()
    monkeypatch.setattr(reporter, "say", lines.append)
    write(tmp_path, {"trace-model.json": sample("trace-model.json")})
    (tmp_path / "broken.json").write_text('{"kind": "sweep", ')
    (tmp_path / "partial.json").write_text('{"kind": "sweep"}')
    (tmp_path / "odd.json").write_text('{"kind": "evaluation", "name": "<i>", "model": "m", "perplexity": "low"}')
    (tmp_path / PLAN).write_text("[1, 2]")
    (tmp_path / "other.json").write_text('{"kind": "shopping list"}')
    report = write_report(tmp_path, progress=reporter)
    assert report.records == {"trace": 1}
    assert tuple(lines) == report.skipped
    reasons = {Path(line.split()[0]).name: line for line in report.skipped}
    assert reasons.keys() == {"broken.json", "partial.json", "odd.json", PLAN}
    assert "object missing required field `model`" in reasons["partial.json"]
    assert "perplexity: expected `float | null`, got `str`" in reasons["odd.json"]
    page = readable(Path(report.out).read_text())
    assert all(words in page for words in ("4 files could not be read", *reasons))


@pytest.mark.parametrize("name", sorted({*FILES} - {"trace-model.json"}))
def test_no_damage_to_a_record_raises(tmp_path, unpainted, name):
    """A field that is gone, empty or of another type: the record is drawn without it, or skipped."""
    folder = write(tmp_path, {"fine.json": sample("verification.json"), name: {}})
    changes = [*itertools.product(range(len(list(places(sample(name))))), (..., None, "text", [], {}, -1, [None]))]
    for number, change in changes[:: 1 + len(changes) // 30]:
        record = sample(name)
        inner, key = list(places(record))[number]
        inner[key] = change
        if change is ...:
            del inner[key]
        write(folder, {name: record})
        assert write_report(folder).records["verification"] >= 1, (number, change)


def test_perplexity_is_per_token_where_one_per_word_is_unknown(tmp_path, unpainted):
    huge = sample("sweep.json")
    huge["rows"][0]["word_perplexity"] = huge["rows"][1]["perplexity"] = None
    text = page_text(tmp_path, {"sweep.json": huge})
    assert "Perplexity per token 20.00 → 60.00" in text
    assert "token ppl ↓" in text
    assert "Perplexity is per token, not per word" in text
    for record, unit in ((huge, "token"), (sample("sweep.json"), "word")):
        assert pareto(SweepRecord.from_json(record)).axes[0].get_ylabel() == f"perplexity per {unit}"


def test_task_metrics_appear_beside_the_perplexities_of_a_sweep(tmp_path, unpainted):
    record = sample("sweep.json")
    for number, entry in enumerate((record["uncut"], *record["rows"])):
        scores = {"metrics": {"word_perplexity": 30.5 + number, "bits_per_byte": 0.875}}
        scores["higher_is_better"] = {"word_perplexity": False, "bits_per_byte": False}
        entry["lm_eval"] = {"tasks": {"wikitext": scores}}
    text = page_text(tmp_path, {"sweep.json": record})
    assert "wikitext word perplexity wikitext bits per byte" in text
    assert "wikitext word perplexity 30.500, wikitext bits per byte 0.875" in text
    assert "wikitext word_perplexity ↓" in text
    grid = tables.main_grid(SweepRecord.from_json(record))
    assert grid.baseline[:4] == ("110.00", "30.50", "0.100", "–")
    assert len(grid.baseline) == sum(len(titles) for _, titles in grid.groups), "the uncut model is in every group"
    assert dict(grid.lines)["L1"][:2] == (("565.00", 1), ("34.50", 1)), "the second best at key dim 2"
    assert "<u>565.00</u> | <u>34.50</u>" in tables.as_markdown(grid)
    assert r"wikitext word\_perplexity $\downarrow$" in tables.as_latex(grid)
    assert r"\underline{565.00} & \underline{34.50}" in tables.as_latex(grid)
    header, first, *_ = tables.as_csv(SweepRecord.from_json(record).rows).splitlines()
    assert header.endswith("tokens,words,bytes,wikitext word_perplexity,wikitext bits_per_byte")
    assert first.endswith("4096,2048,10240,31.5,0.875")


def test_a_page_replaces_nothing_but_a_page(tmp_path, unpainted):
    records = write(tmp_path, {"trace.json": sample("trace-model.json")})
    (tmp_path / "taken").mkdir()
    (tmp_path / "thesis.html").write_text("years of work")
    os.mkfifo(tmp_path / "pipe")
    refusals = {"taken": "is a folder", "pipe": "is a pipe", "thesis.html": "is not a slimstate report"}
    for name, reason in refusals.items():
        with pytest.raises(OutputError, match=f"{name} {reason}"):
            write_report(records, tmp_path / name)
    assert (tmp_path / "thesis.html").read_text() == "years of work"
    for _ in range(2):
        assert write_report(records, tmp_path / "page.html").bytes


def test_the_page_of_a_big_model_is_under_three_megabytes(whole_page, tmp_path):
    """All of what grows with the model, beside the page with everything of a small one."""
    filters = sample("filters-model.json")
    filters["filters"] = {layer: {"key": [roles["key"][0] * 16] * 16} for layer, roles in filters["filters"].items()}
    records = {"filters-model.json": filters}
    records |= {f"big/trace-{i}.json": large_trace(24, 16, name=f"m{i}") for i in range(3)}
    channels = {str(layer): {"keep": [list(range(0, 128, 2))] * 16} for layer in range(24)}
    plan = sample(PLAN_FILE, width=128, key_dim=64, layers=channels)
    records |= {f"big/{i}/{PLAN}": plan for i in range(6)}
    report = write_report(write(tmp_path, records))
    assert report.skipped == ()
    assert report.bytes + whole_page.stat().st_size < 3_000_000
    assert "left out to keep the page small" in Path(report.out).read_text()


def test_svg_rounds_coordinates_and_no_labels():
    flat = TraceRecord.from_json(sample("trace-model.json", curve=[0.19] * 16))
    drawing = plot_style.svg(utilisation_curves([flat]), "x")
    assert {"0.025", "0.075"} <= set(re.findall(r">(0\.\d+)</text>", drawing))
    assert not re.search(r' d="[^"]*\d\.\d{3}', drawing)


def test_many_states_are_thinned_unless_one_is_outside_its_bounds(tmp_path, unpainted):
    many = large_trace(20, 8)
    states = many["bounds"]["states"]
    assert states > MAX_STATES
    for violations, counts, badge in ((0, range(1, MAX_STATES + 1), "good"), (3, [states], "bad")):
        many["bounds"]["violations"] = violations
        assert len(retrieval([TraceRecord.from_json(many)]).axes[0].lines[1].get_xdata()) in counts
        page = Path(write_report(write(tmp_path, {"trace.json": many})).out).read_text()
        assert f'class="badge {badge}">{violations or "None"}</strong> of {states} sampled states' in page
        assert ("only an evenly spaced part is drawn" in page) == (violations == 0)


def test_the_page_fetches_nothing(whole_page):
    page = whole_page.read_text()
    namespaces = {"http://www.w3.org/1999/xlink", "http://www.w3.org/2000/svg"}
    assert {*re.findall(r"https?://[^\s\"'<>)]+", page)} <= namespaces
    assert not re.search(r"(?:src|href)=\"(?!#|data:)|@import", page)
    assert "default-src 'none'" in page


def test_a_report_needs_neither_torch_nor_transformers(tmp_path):
    write(tmp_path, {name: sample(name) for name in ("trace-model.json", "evaluation.json")})
    heavy = "{'torch', 'transformers', 'fla', 'safetensors'}"
    code = f"import sys, slimstate; slimstate.report({str(tmp_path)!r}); print(sorted({heavy} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_strips_cover_the_kept_channels_and_no_other():
    assert strip_path([7, 0, 1, 4, 6], 2) == "M0 2h2m2 0h1m1 0h2"
    assert strip_path([3], 2.5) == "M0 2.5m3 0h1"
    assert strip_path([], 2) == "M0 2"


def test_colours_go_from_dark_to_bright_and_stay_within_the_scale():
    scale = Scale(1, 10_000, logarithmic=True)
    assert scale.colour(100) == Scale(0, 1).colour(0.5)
    assert scale.colour(0.001) == scale.colour(1)
    assert (scale.is_dark(1), scale.is_dark(1e9)) == (True, False)
    assert Scale(2, 2).colour(2) == Scale.ramp[0]


@pytest.fixture(scope="module")
def desktop(browser: Any, whole_page: Path) -> Any:
    """Return the page in a wide window, with its errors and requests."""
    page = browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce").new_page()
    page.errors, page.requests = [], []
    page.on("console", lambda message: page.errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    page.on("request", lambda request: page.requests.append(request.url))
    page.goto(whole_page.as_uri())
    return page


def point_at(page: Any, locator: Any, x: float = 0.5, y: float = 0.5) -> None:
    """Move the mouse to a place in an element, as shares of its width and height."""
    locator.scroll_into_view_if_needed()
    box = locator.bounding_box()
    page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"])


def column(page: Any, number: int) -> list[str]:
    """Return the sort values of a column of the sweep."""
    values = f"rows => rows.map(row => row.cells[{number}].dataset.value ?? '')"
    return page.eval_on_selector_all("#trade-off table.sortable tbody tr", values)


def luminance(colour: str) -> float:
    shares = [float(part) / 255 for part in re.findall(r"[\d.]+", colour)[:3]]
    linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    dark, bright = sorted((luminance(one), luminance(other)))
    return (bright + 0.05) / (dark + 0.05)


def style(page: Any, selector: str, name: str) -> str:
    return page.eval_on_selector(selector, f"element => getComputedStyle(element).{name}")


def test_the_page_opens_without_an_error_or_a_request(desktop, whole_page):
    assert desktop.errors == []
    assert [url for url in desktop.requests if not url.startswith("data:")] == [whole_page.as_uri()]
    boxes = [drawing.bounding_box() for drawing in desktop.locator("figure svg.drawing").all()]
    assert len(boxes) == 9
    assert all(box["width"] > 400 and box["height"] > 100 for box in boxes)


def test_headers_sort_numbers_and_words_both_ways_and_unknown_values_stay_last(desktop):
    header = desktop.locator("#trade-off table.sortable th", has_text="perplexity per token")
    for direction, sign in (("ascending", 1), ("descending", -1)):
        header.locator("button").click()
        assert header.get_attribute("aria-sort") == direction
        values = [sign * float(value) for value in column(desktop, 5)]
        assert values == sorted(values)
        assert len(set(values)) > 5
    for _ in range(2):
        desktop.locator("#trade-off table.sortable th", has_text="median").locator("button").click()
        assert column(desktop, 10)[-2:] == ["", ""]
    assert header.get_attribute("aria-sort") == "none"
    desktop.locator("#trade-off table.sortable th button").first.focus()
    for descending in (False, True):
        desktop.keyboard.press("Enter")
        assert column(desktop, 0) == sorted(column(desktop, 0), reverse=descending)
        assert {"drrqr", "random"} <= set(column(desktop, 0))


def test_a_point_of_the_figure_has_a_tooltip_and_lights_its_row(desktop):
    row = sample("sweep.json")["rows"][3]
    point_at(desktop, desktop.locator("#pareto-point-3"))
    assert desktop.locator("#tooltip").inner_text().split("\n") == [
        f"{row['method']} ({row['score']}), key dim {row['key_dim']}",
        f"perplexity {row['perplexity']:.2f} per token, {row['word_perplexity']:.2f} per word, 1.250 bits per byte",
        f"{row['nats_over_uncut']:+.3f} nats per token over uncut",
        "state 0.5 MiB, 75% less",
    ]
    assert desktop.locator("tr.lit").get_attribute("data-point") == "pareto-point-3"
    desktop.mouse.move(5, 450)
    assert desktop.locator("#tooltip").is_hidden()


def test_cells_of_a_map_have_tooltips_for_mouse_and_keyboard(desktop):
    cells = desktop.locator(".heat").first.locator("tbody td")
    cells.nth(2).scroll_into_view_if_needed()
    cells.nth(2).hover()
    value = sample("trace-model.json")["utilisation_by_head"][1][0]
    expected = f"layer 1, head 0: utilisation {value:.3f}"
    assert desktop.locator("#tooltip").inner_text().startswith(expected)
    assert cells.nth(2).get_attribute("aria-label").startswith(expected)
    desktop.mouse.move(0, 0)
    cells.first.focus()
    desktop.keyboard.press("ArrowRight")
    desktop.keyboard.press("ArrowDown")
    assert desktop.locator("#tooltip").inner_text().startswith("layer 1, head 1:")
    desktop.keyboard.press("Escape")
    assert desktop.locator("#tooltip").is_hidden()


def test_the_tooltip_of_a_strip_names_the_channel(desktop):
    channels = sample(PLAN_FILE)["layers"]["0"]["keep"][1]
    for channel in range(8):
        point_at(desktop, desktop.locator(".strip svg").first, (channel + 0.5) / 8, 0.75)
        state = "kept" if channel in channels else "removed"
        assert desktop.locator("#tooltip").inner_text().endswith(f"channel {channel}: {state}")


def test_the_copy_buttons_work_with_and_without_a_clipboard(desktop):
    expect = pytest.importorskip("playwright.sync_api").expect
    for number, script in enumerate(("", "Object.defineProperty(navigator, 'clipboard', { value: undefined })")):
        desktop.evaluate(script)
        desktop.locator(".copy").nth(number).click()
        expect(desktop.locator(".copy").nth(number)).to_have_text(re.compile("Copied|Selected"))
    assert desktop.evaluate("getSelection().toString()").startswith("import fla")
    assert desktop.errors == []


def test_a_phone_scrolls_down_only_and_shows_tooltips_on_a_tap(browser, whole_page):
    page = browser.new_context(viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True).new_page()
    page.goto(whole_page.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    cell = page.locator(".heat td[data-tip]").first
    cell.scroll_into_view_if_needed()
    cell.tap()
    assert page.locator("#tooltip").inner_text().startswith("layer 0, head 0:")
    box = page.locator("#tooltip").bounding_box()
    assert 0 <= box["x"] <= 360 - box["width"]


def test_the_dark_scheme_changes_page_text_and_figures(browser, whole_page):
    backgrounds, page = {}, browser.new_page()
    page.goto(whole_page.as_uri())
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        paper, text = style(page, "figure", "backgroundColor"), style(page, "figure svg.drawing text", "fill")
        backgrounds[scheme] = style(page, "body", "backgroundColor")
        assert contrast(backgrounds[scheme], style(page, "body", "color")) > 10
        assert contrast(paper, text) > 10
        assert contrast(paper, style(page, "figcaption", "color")) > 4.5
        for cell in (".heat td.deep", ".heat td[data-tip]:not(.deep):not(.none)"):
            assert contrast(style(page, cell, "backgroundColor"), style(page, cell, "color")) > 3
    assert luminance(backgrounds["light"]) > 0.8
    assert luminance(backgrounds["dark"]) < 0.05


def test_paper_has_light_colours_and_no_controls(browser, whole_page):
    page = browser.new_context(viewport={"width": 690, "height": 980}, color_scheme="dark").new_page()
    page.goto(whole_page.as_uri())
    page.locator("#pareto-point-0").focus()
    page.emulate_media(media="print")
    assert all(page.locator(control).first.is_hidden() for control in (".toc", "#tooltip", ".copy"))
    assert luminance(style(page, "body", "backgroundColor")) > 0.9
    assert luminance(style(page, "body", "color")) < 0.05
    assert style(page, "figure", "breakInside") == "avoid"
    assert page.evaluate("document.documentElement.scrollWidth") <= 690
