"""The report: from records alone, one page that stands by itself, whatever the records hold or lack."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="figures need matplotlib: pip install 'slimstate[report]'")

from slimstate.core.file_names import PLAN
from slimstate.core.stock_class import StockClass
from slimstate.records.folder import Found, Records
from slimstate.records.reconstruction import RECONSTRUCTION
from slimstate.records.schema import from_json
from slimstate.records.states import TraceRecord
from slimstate.records.sweep import SweepRecord
from slimstate.records.training import RECOVERY, RecoverySettings
from slimstate.report import pieces, plots, tables, usable_records, write_report
from slimstate.report.again import distinct
from slimstate.report.heat import Scale
from slimstate.report.markup import Html, element, joined
from slimstate.report.numbers import brief, fixed, magnitude, mebibytes
from slimstate.report.provenance import Provenance
from slimstate.report.recovery import trained_parts
from slimstate.report.reproduce import reproduce_section
from slimstate.report.states import state_section
from slimstate.report.strips import runs, strip_path
from slimstate.system.errors import DataError, OutputError
from slimstate.system.json_files import write_json
from slimstate.system.progress import Reporter

FOLDER = Path(pieces.__file__).parent

Record = dict[str, Any]
VERSIONS = {"python": "3.11.7", "slimstate": "0.1.0", "torch": "2.13.0"}
TEXT = {"data": "text.txt", "samples": 1, "length": 256, "seed": 0, "digest": "sha256:7e87" + "0" * 60}
METHODS = ("random", "l1", "drrqr")


def wave(*where: float) -> float:
    """A number between 0 and 1 that looks arbitrary and is the same every time."""
    return 0.5 + 0.5 * math.sin(sum((position + 1) * 12.9898 * (number + 1) for number, position in enumerate(where)))


def cut(method: str = "drrqr", width: int = 8, key_dim: int = 4) -> Record:
    return {"method": method, "width": width, "key_dim": key_dim, "base_model": "base/model", "score": "kq"}


def identity(name: str, cut_by: Record | None) -> Record:
    return {
        "name": name,
        "model": f"models/{name}",
        "fingerprint": "sha256:f1f1" + "0" * 60,
        "model_type": "delta_net",
        "key_dim": cut_by["key_dim"] if cut_by else 8,
        "value_dim": 8,
        "cut": cut_by,
        "kernels": "PyTorch on the CPU, float32",
        "seed": 0,
        "versions": VERSIONS,
        "command": f"slimstate analyze models/{name} --text text.txt --out records",
    }


def sweep(model: str = "base/model", scores: tuple[str, ...] = ("kq", "q")) -> Record:
    rows = [
        {
            "method": method,
            "score": score,
            "compression": 1 - key_dim / 8,
            "key_dim": key_dim,
            "state_bytes": key_dim * 2**18,
            "perplexity": 20 + 10 * (8 - key_dim) + 5 * number + 40 * (score == "q"),
            "word_perplexity": 120 + 70 * (8 - key_dim) + 25 * number + 90 * (score == "q"),
            "bits_per_byte": 1.25,
            "tokens": 4096,
            "words": 2048,
            "bytes": 10240,
            "nats_per_token": 3.0,
            "nats_over_uncut": 0.05 * (8 - key_dim) + 0.01 * number,
            "rank_utilisation": 0.2 + 0.01 * number,
            "kappa": 1000.0 / (number + 1) if method != "random" else None,
            "kappa_worst": 123456.0 if method != "random" else None,
        }
        for number, method in enumerate(METHODS)
        for score in (scores if method != "random" else scores[:1])
        for key_dim in (4, 2)
    ]
    uncut = {"key_dim": 8, "state_bytes": 2**21, "perplexity": 20.0, "nats_per_token": 2.9, "rank_utilisation": 0.1}
    uncut |= {"word_perplexity": 110.0, "bits_per_byte": 1.125, "tokens": 4096, "words": 2048, "bytes": 10240}
    return {
        "kind": "sweep",
        "model": model,
        "model_type": "delta_net",
        "width": 8,
        "settings": {"fingerprint": "sha256:f1f1", "calibration": TEXT, "text": TEXT, "f": 1.5, "seed": 0},
        "command": f"slimstate sweep {model} --data c.txt --text text.txt --out records",
        "versions": VERSIONS,
        "kernels": "PyTorch on the CPU, float32",
        "uncut": uncut,
        "rows": rows,
        "recommended": {
            "row": 0,
            "within": True,
            "max_loss": 0.3,
            "reason": "random at key dim 4: 50% less state",
            "command": f"slimstate prune {model} --out SLIM --method random --key-dim 4",
        },
    }


def trace(name: str = "model", cut_by: Record | None = None, layers: int = 2, heads: int = 2, width: int = 8) -> Record:
    def by_head(value: Any) -> Any:
        return [[value(layer, head) for head in range(heads)] for layer in range(layers)]

    states = layers * heads * 4
    upper = [10.0 + 90 * wave(i) for i in range(states)]
    return {
        "kind": "trace",
        **identity(name, cut_by),
        "text": TEXT,
        "every": 16,
        "skip": 64,
        "capacity": width,
        "layers": list(range(layers)),
        "heads": heads,
        "times": list(range(16, 257, 16)),
        "curve": [0.1 + 0.001 * i for i in range(16)],
        "utilisation_by_head": by_head(lambda layer, head: round(0.1 + 0.5 * wave(layer, head), 5)),
        "kappa_by_head": by_head(lambda layer, head: None if layer == head == 0 else 10 ** (1 + 4 * wave(head, layer))),
        "histogram": {
            "low": -8.0,
            "high": 3.0,
            "counts": by_head(lambda layer, head: [int(40 * wave(layer, head, i)) for i in range(110)]),
        },
        "spectrum": by_head(lambda layer, head: [-0.1 * i for i in range(width)]),
        "bounds": {
            "states": states,
            "violations": 0,
            "effective_rank": [1 + 7 * wave(i) for i in range(states)],
            "amplification": [1.0] * states,
            "amplification_lower": [0.01 + 0.1 * wave(i) for i in range(states)],
            "amplification_upper": [None if i == 0 else value for i, value in enumerate(upper)],
        },
    }


def filters(name: str = "model", cut_by: Record | None = None, heads: int = 2, width: int = 8) -> Record:
    def filters_of(layer: int) -> list[Any]:
        return [
            [[round(wave(layer, h, c, tap) - 0.5, 3) for tap in range(4)] for c in range(width)] for h in range(heads)
        ]

    roles = ("query", "key", "value")
    return {
        "kind": "filters",
        **identity(name, cut_by),
        "text": TEXT,
        "filters": {str(layer): {role: filters_of(layer) for role in roles} for layer in (0, 1)},
        "likeness": {role: {"0": [0.25] * heads, "1": [-0.05] * heads} for role in roles},
    }


def result(name: str, cut_by: Record | None, quality: float) -> Record:
    points = [
        {"pairs": pairs, "accuracy": quality * 0.8 / pairs, "stderr": 0.05, "exact": 0.0, "questions": 32}
        for pairs in (2, 4, 8)
    ]
    tasks = {
        "lambada_openai": {
            "metrics": {"acc": 0.5 * quality, "perplexity": 10 / quality},
            "stderr": {"acc": 0.012},
            "higher_is_better": {"acc": True, "perplexity": False},
            "samples": 100,
            "version": 1,
            "data": {"path": "x", "digest": None},
        }
    }
    return {
        **{key: value for key, value in identity(name, cut_by).items() if key not in ("seed", "versions", "command")},
        "text": "text.txt",
        "digest": TEXT["digest"],
        "length": 256,
        "windows": 4,
        "tokens": 1024,
        "perplexity": 20 / quality,
        "nats_per_token": 3.0,
        "bits_per_byte": 1.5,
        "associative_recall": {"points": points, "mean": 0.3, "candidates": 64, "seed": 0},
        "lm_eval": {"tasks": tasks, "averages": {"zero_shot": 0.5 * quality}, "seed": 0, "limit": None},
    }


def evaluation(name: str = "slim") -> Record:
    shares = {"perplexity": 0.8, "lambada_openai acc": 0.8, "lambada_openai perplexity": 0.8, "zero-shot average": 0.8}
    return {
        "kind": "evaluation",
        **result(name, cut(), 0.8),
        "baseline": result("model", None, 1.0),
        "compared": [{"measure": name, "model": 1, "baseline": 1, "share": share} for name, share in shares.items()],
        "seed": 0,
        "versions": VERSIONS,
        "command": f"slimstate eval models/{name} --text text.txt --baseline models/model",
    }


def plan(layers: int = 2, heads: int = 2, width: int = 8, key_dim: int = 4, source: str = "base/model") -> Record:
    def kept(layer: int, head: int) -> list[int]:
        return sorted(sorted(range(width), key=lambda channel: wave(layer, head, channel))[:key_dim])

    return {
        "kind": "plan",
        "format": 1,
        "model_type": "delta_net",
        "width": width,
        "key_dim": key_dim,
        "method": "drrqr",
        "score": "kq",
        "seed": 0,
        "corrected": True,
        "options": {"f": 1.5},
        "model": {"source": source, "fingerprint": "sha256:f1f1" + "0" * 60},
        "calibration": TEXT,
        "versions": VERSIONS,
        "compression": 1 - key_dim / width,
        "certificate": {"rho": 1.234, "swaps": 7.0, "condition_before": 5000.0, "condition_after": 300.0},
        "layers": {
            str(layer): {
                "keep": [kept(layer, head) for head in range(heads)],
                "rho": [1.234] * heads,
                "swaps": [7 if layer == head == 0 else 0 for head in range(heads)],
                "condition_before": [5000.0] * heads,
                "condition_after": [300.0] * heads,
            }
            for layer in range(layers)
        },
        "parent": None,
    }


def recovery(name: str = "recovered", cut_by: Record | None = None) -> Record:
    nats = {"before": 4.5, "after": 4.2, "uncut": 4.0, "control": 3.9}
    return {
        "kind": "recovery",
        **identity(name, cut_by or cut()),
        "teacher": {"model": "base/model", "fingerprint": "sha256:f1f1"},
        "settings": {"adaptation": {"full": False, "targets": ["q_proj"]}, "length": 64, "batch_size": 4, "seed": 0},
        "corpus": {"data": "text.txt", "digest": "sha256:c0de"},
        "tokens": 25_600,
        "measured": {"text": "text.txt", "tokens": 4096, "nats": nats, "closed": {"uncut": 0.6, "control": 0.5}},
        "log": [{"step": step, "loss": 5 + wave(step)} for step in range(1, 101)],
        "command": "slimstate recover models/slim --teacher base/model --data text.txt --out models/recovered",
    }


def everything() -> dict[str, Record]:
    return {
        "recovery.json": recovery(),
        "sweep.json": sweep(),
        "trace-model.json": trace(),
        "trace-slim.json": trace("slim", cut(), width=4),
        "filters-model.json": filters(),
        "evaluation.json": evaluation(),
        f"cut/{PLAN}": plan(),
    }


def write(folder: Path, records: dict[str, Record]) -> Path:
    for name, record in records.items():
        write_json(folder / name, record)
    return folder


class Heard(Reporter):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


@pytest.fixture
def unpainted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are made and not painted, which is what takes the time."""
    monkeypatch.setattr(pieces.plots, "svg", lambda figure, prefix: f'<svg><g id="{prefix}-figure_1"/></svg>')


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with every section."""
    folder = write(tmp_path_factory.mktemp("records"), everything())
    return Path(write_report(folder).out)


def readable(page: str) -> str:
    """What a person reads of a page, on one line."""
    page = re.sub(r"<(style|script)>.*?</\1>", "", page, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]*>", " ", page).split())


def test_the_report_says_what_it_made(tmp_path, unpainted):
    made = write_report(write(tmp_path, everything()), tmp_path / "out" / "page.html")
    page = tmp_path / "out" / "page.html"
    counts = {"sweep": 1, "trace": 2, "filters": 1, "evaluation": 1, "plan": 1, "recovery": 1}
    assert made.to_json() == {"out": str(page), "records": counts, "skipped": [], "bytes": page.stat().st_size}
    assert [path.name for path in page.parent.iterdir()] == ["page.html"]


def test_every_section_shows_the_numbers_of_its_records(whole):
    text = readable(whole.read_text())
    for words in (
        "slimstate report",
        "2.00 → 1.00",
        "Perplexity per word 110.00 → 400.00 20.00 → 60.00 per token",
        "Perplexity per word (lower is better, on a logarithmic scale)",
        "perplexity 20.00 per token, 110.00 per word, 1.125 bits per byte",
        "per word, as in the paper's WikiText columns: 4,096 tokens, 2,048 words, 10,240 bytes of text.txt.",
        "random recommended kq 50% 4 1.00 60.00 400.00 1.2500",
        "What was cut",
        "4 of 8 channels kept in every head, 50% less state",
        "largest rho 1.23 after 7 exchanges; worst condition number of a head's keys 5,000 → 300",
        "The trade-off",
        "Recommended random at key dim 4: 50% less state",
        "50% compression",
        "Perplexity by what channels are judged by",
        "How much of the state is used",
        "None of 32 sampled states is outside of any bound.",
        "Convolution filters",
        "query 0.100, key 0.100",
        "Recovery",
        "recovered (drrqr, 4 of 8) 25,600 adapters, convolutions 4.5000 4.2000 4.0000 3.9000 50.0%",
        "Evaluation",
        "lambada_openai",
        "± 0.012",
        "80.0%",
        "Reproduce",
        "slimstate prune base/model --out again/SLIM --method random --key-dim 4",
        "from transformers import AutoModelForCausalLM",
        "2.13.0",
        "trace-slim.json",
    ):
        assert words in text.replace("&#x27;", "'"), words


@pytest.mark.slow
def test_the_same_records_give_the_same_bytes(whole, tmp_path):
    again = write_report(whole.parent, tmp_path / "again.html")
    assert Path(again.out).read_bytes() == whole.read_bytes()


def test_commands_are_given_once_and_in_order(whole):
    listing = re.search(r'<div class="listing commands">.*?</div>', whole.read_text(), re.DOTALL)[0]
    lines = [" ".join(re.sub("<[^>]*>", "", line).split()) for line in listing.split("\n")]
    verbs = [re.sub("^Copy", "", line).split()[1] for line in lines]
    assert verbs == ["sweep", "prune", "prune", "recover", "analyze", "analyze", "eval"]
    assert f"--apply {whole.parent / 'cut' / PLAN}" in lines[2]


def test_commands_to_measure_again_write_to_places_of_their_own():
    lines = [
        "slimstate prune m --apply a/plan.json --out a/slim",
        "slimstate prune m --apply b/plan.json --out b/slim",
        "slimstate eval m --text t --out /far/away/record.json",
        "slimstate eval n --text t --out record.json",
        "slimstate eval m --text t",
        "slimstate eval m --text t",
        "an 'open quote --out x",
        "slimstate eval m --out",
    ]
    assert distinct(lines) == [
        "slimstate prune m --apply a/plan.json --out again/slim",
        "slimstate prune m --apply b/plan.json --out again/slim-2",
        "slimstate eval m --text t --out again/record.json",
        "slimstate eval n --text t --out again/record-2.json",
        *lines[5:],
    ]


def test_what_is_not_on_a_page_is_named_with_the_command_that_adds_it(tmp_path, unpainted):
    """A cut alone, as the first commands of the README leave it."""
    folder = write(tmp_path, {f"slim/{PLAN}": plan()})
    (folder / "slim" / "config.json").write_text("{}")
    alone = readable(Path(write_report(folder).out).read_text())
    for words in (
        "Not on this page What the cut costs, beside the uncut model; How much of the state is used",
        f"slimstate eval {folder / 'slim'} --baseline base/model --text TEXT --out {folder / 'evaluation.json'}",
        f"slimstate analyze base/model {folder / 'slim'} --text TEXT",
        "slimstate sweep base/model --data TEXT --text OTHER_TEXT",
    ):
        assert words in alone, words
    assert "Not on this page" not in readable(Path(write_report(write(tmp_path / "all", everything())).out).read_text())


def test_a_model_has_one_utilisation_and_a_note_where_the_sweep_found_another(tmp_path, unpainted):
    swept = sweep()
    row = swept["rows"][0]
    base = swept["settings"]["fingerprint"]
    same = cut(row["method"], key_dim=row["key_dim"]) | {"base_fingerprint": base, "score": row["score"]}
    looked = [trace("model") | {"fingerprint": base}, trace("slim", same, width=row["key_dim"])]
    records = {"sweep.json": swept, "trace-model.json": looked[0], "trace-slim.json": looked[1]}
    means = [fixed(sum(map(sum, each["utilisation_by_head"])) / 4, 3) for each in looked]
    assert len(looked[0]["utilisation_by_head"]) == len(looked[0]["utilisation_by_head"][0]) == 2
    text = readable(Path(write_report(write(tmp_path, records)).out).read_text())
    swept["recommended"]["row"] = 0
    assert f"model (uncut) {fixed(swept['uncut']['rank_utilisation'], 3)}, here {means[0]}" in text
    write(tmp_path, records)
    text = readable(Path(write_report(tmp_path).out).read_text())
    assert f"State in use {means[0]} → {means[1]} rank utilisation over a text" in text
    looked[1]["cut"]["base_fingerprint"] = "sha256:another"
    text = readable(Path(write_report(write(tmp_path, records)).out).read_text())
    assert "rank utilisation at the end of windows" in text, "of a cut of another model nothing is taken"


@pytest.mark.parametrize(("tokens", "warned"), [(8192, True), (200_000, False)])
def test_shares_on_few_tokens_come_with_a_warning(tmp_path, unpainted, tokens, warned):
    record = evaluation("slim") | {"tokens": tokens, "words": tokens // 2, "bytes": tokens * 4}
    text = readable(Path(write_report(write(tmp_path, {"evaluation.json": record})).out).read_text())
    assert (f"Few tokens Measured on {tokens:,} tokens: “kept” may be off" in text) == warned


def test_several_records_of_a_kind_each_have_their_place(tmp_path, unpainted):
    records = {
        "a/sweep.json": sweep("first/model"),
        "b/sweep.json": sweep("second/model", scores=("kq",)),
        f"a/{PLAN}": plan(source="first/model"),
        f"b/{PLAN}": plan(source="second/model", layers=3),
        "trace-a.json": trace("a"),
        "trace-b.json": trace("b", cut(), width=4),
        "trace-c.json": trace("c", layers=3, heads=1),
        "one.json": evaluation("one"),
        "two.json": evaluation("two"),
    }
    page = Path(write_report(write(tmp_path, records)).out).read_text()
    headings = [readable(heading) for heading in re.findall(r"<h3>.*?</h3>", page, re.DOTALL)]
    assert {"a, b", "c"} <= set(headings)
    assert sum(heading.startswith(("one (drrqr", "two (drrqr")) for heading in headings) == 2
    for model in ("first/model", "second/model"):
        assert f"{model}: key dim 8 → 4" in headings
        assert any(heading.startswith(f"{model} /") for heading in headings)
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert len(ids) == len(set(ids))


def test_the_plan_of_a_reconstructed_model_is_shown_once(tmp_path):
    folder = write(tmp_path, {f"slim/{PLAN}": plan(), f"better/{PLAN}": plan()})
    (folder / "better" / RECONSTRUCTION).write_text("{}")
    assert [found.path.parent.name for found in usable_records(folder).plan] == ["slim"]
    shutil.rmtree(folder / "slim")
    assert [found.path.parent.name for found in usable_records(folder).plan] == ["better"]


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"adaptation": {"full": True}}, "all weights"),
        ({"adaptation": {"full": False, "mixers": 3}}, "the mixers"),
        ({"adaptation": {"full": False}, "unfreeze": "norms,biases"}, "adapters, convolutions, norms, biases"),
    ],
)
def test_what_a_recovery_trained_is_named(settings, parts):
    assert trained_parts(from_json(RecoverySettings, {"length": 64, "batch_size": 4, **settings})) == parts


def test_the_plan_of_a_recovered_model_is_shown_once(tmp_path, unpainted):
    """Its folder has the plan of the cut, whose own folder is here too."""
    records = {f"slim/{PLAN}": plan(), f"recovered/{PLAN}": plan(), f"recovered/{RECOVERY}": recovery()}
    folder = write(tmp_path, records)
    for name in ("slim", "recovered"):
        (folder / name / "config.json").write_text("{}")
    made = write_report(folder)
    assert made.records == {"plan": 1, "recovery": 1}
    shutil.rmtree(folder / "slim")
    assert write_report(folder).records == {"plan": 1, "recovery": 1}


@pytest.mark.parametrize(
    ("name", "sections"),
    [
        ("sweep.json", ["trade-off"]),
        ("trace-model.json", ["states"]),
        ("filters-model.json", ["filters"]),
        ("evaluation.json", ["evaluation"]),
        ("recovery.json", ["recovery"]),
        (f"cut/{PLAN}", ["cut"]),
    ],
)
def test_a_page_has_the_sections_that_it_has_records_for(tmp_path, unpainted, name, sections):
    page = Path(write_report(write(tmp_path, {name: everything()[name]})).out).read_text()
    assert re.findall(r'<section id="([^"]*)"', page) == [*sections, "reproduce"]
    assert re.findall(r'<a href="#([^"]*)"', page) == [*sections, "reproduce", "records"]


@pytest.mark.slow
def test_whatever_a_record_says_is_escaped(tmp_path):
    evil = '<b onclick="x">$&amp;^_{$</b><script>alert(1)</script>'
    records = everything()
    for record in records.values():
        for field in ("name", "command", "kernels"):
            record[field] = evil
        record["model"] = {"source": evil, "fingerprint": evil} if "format" in record else evil
        record["versions"] = {evil: evil}
    for name in ("trace-model.json", "filters-model.json"):
        records[name]["text"] = {"data": evil, "digest": evil}
        records[name]["cut"] = {**cut(), "method": evil, "base_model": evil}
    records["sweep.json"]["recommended"]["reason"] = evil
    records["sweep.json"]["rows"][3] |= {"method": evil, "score": evil}
    records["evaluation.json"]["lm_eval"]["tasks"][evil] = records["evaluation.json"]["lm_eval"]["tasks"].pop(
        "lambada_openai"
    )
    records[f"cut/{PLAN}"]["method"] = evil
    records["filters-model.json"]["filters"] = {evil: {evil: filters()["filters"]["0"]["key"]}}
    made = write_report(write(tmp_path, records))
    page = Path(made.out).read_text()
    assert made.skipped == ()
    assert "<b " not in page
    assert page.count("<script") == 1
    assert page.count("&lt;script&gt;alert(1)") > 20


def test_markup_escapes_text_and_keeps_markup():
    assert element("p", "<i>", Html("<i>"), None, title='"<', class_="a", hidden=True, id=None) == (
        '<p title="&quot;&lt;" class="a" hidden>&lt;i&gt;<i></p>'
    )
    assert joined(["a", Html("<br>"), 1], " ") == "a <br> 1"


def test_an_empty_folder_is_told_which_verbs_make_records(tmp_path):
    with pytest.raises(DataError, match=r"no record under .*sweep.*analyze.*eval.*prune") as caught:
        write_report(tmp_path)
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match="no folder"):
        write_report(tmp_path / "nowhere")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_broken_records_names_one(tmp_path):
    (tmp_path / "sweep.json").write_text('{"kind": "sweep"}')
    with pytest.raises(DataError, match=r"no record under .* that can be used: .*sweep\.json was skipped"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_what_cannot_be_read_is_named_skipped_and_said(tmp_path, unpainted):
    write(tmp_path, {"trace-model.json": trace()})
    (tmp_path / "broken.json").write_text('{"kind": "sweep", ')
    (tmp_path / "partial.json").write_text('{"kind": "sweep"}')
    (tmp_path / "odd.json").write_text('{"kind": "evaluation", "name": "<i>", "model": "m", "perplexity": "low"}')
    (tmp_path / PLAN).write_text("[1, 2]")
    (tmp_path / "other.json").write_text('{"kind": "shopping list"}')
    heard = Heard()
    made = write_report(tmp_path, reporter=heard)
    page = readable(Path(made.out).read_text())
    assert made.records == {"trace": 1}
    assert tuple(heard.lines) == made.skipped
    said = {Path(line.split()[0]).name: line for line in made.skipped}
    assert said.keys() == {"broken.json", "partial.json", "odd.json", PLAN}
    assert "object missing required field `model`" in said["partial.json"]
    assert "perplexity: expected `float | null`, got `str`" in said["odd.json"]
    assert "4 files could not be used" in page
    assert all(name in page for name in said)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a record; of a list, its first item stands for all."""
    if path:
        yield path
    children = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, child in children:
        yield from places(child, (*path, key))


def with_change(record: Record, path: tuple[Any, ...], change: Any) -> Record:
    changed = deepcopy(record)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    if change is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = change
    return changed


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", sorted({"sweep.json", "trace-slim.json", "evaluation.json", "recovery.json", f"cut/{PLAN}"})
)
def test_no_damage_to_a_record_makes_a_traceback(tmp_path, monkeypatch, name):
    """A field that is gone, empty or of another kind: the record is drawn without it or skipped, and nothing breaks."""
    monkeypatch.setattr(pieces, "drawing", lambda figure, *_: Html("<svg></svg>"))
    for module in ("tradeoff", "states", "evaluation", "recovery"):
        monkeypatch.setattr(sys.modules[f"slimstate.report.{module}"], "drawing", pieces.drawing)
    whole = everything()[name]
    fine = write(tmp_path, {"evaluation-fine.json": {**result("fine", None, 1.0), "kind": "evaluation"}})
    changes = (..., None, "text", [], {}, -1, [None])
    damages = [(path, change) for path in places(whole) for change in changes if path != ("kind",)]
    for path, change in damages[:: 1 + len(damages) // 60]:
        target = fine / name
        target.parent.mkdir(exist_ok=True)
        target.write_text(json.dumps(with_change(whole, path, change)))
        made = write_report(fine)
        assert made.records["evaluation"] >= 1, (path, change)


def test_an_unfinished_sweep_is_drawn_without_a_recommendation(tmp_path):
    unfinished = sweep()
    del unfinished["recommended"]
    unfinished["rows"][1]["perplexity"] = None
    page = readable(Path(write_report(write(tmp_path, {"sweep.json": unfinished})).out).read_text())
    assert "This sweep is not finished" in page
    assert "2.00 per sequence in fp32, uncut" in page


def test_a_sweep_of_0_1_tells_perplexity_per_token_and_says_so(tmp_path, unpainted):
    old = sweep()
    for measured in (old["uncut"], *old["rows"]):
        for name in ("word_perplexity", "bits_per_byte", "tokens", "words", "bytes"):
            del measured[name]
    text = readable(Path(write_report(write(tmp_path, {"sweep.json": old})).out).read_text()).replace("&#x27;", "'")
    assert "Perplexity per token 20.00 → 60.00" in text
    assert "token ppl ↓" in text
    assert "Perplexity is per token; the paper's WikiText columns are per word" in text
    figure = plots.pareto(SweepRecord.from_json(old))
    assert figure.axes[0].get_ylabel() == "perplexity per token"
    assert plots.pareto(SweepRecord.from_json(sweep())).axes[0].get_ylabel() == "perplexity per word"


def test_metrics_of_tasks_stand_beside_the_perplexities_of_a_sweep(tmp_path, unpainted):
    found = sweep(scores=("kq",))
    for number, measured in enumerate((found["uncut"], *found["rows"])):
        scores = {"metrics": {"word_perplexity": 30.5 + number, "bits_per_byte": 0.875}}
        scores["higher_is_better"] = {"word_perplexity": False, "bits_per_byte": False}
        measured["lm_eval"] = {"tasks": {"wikitext": scores}}
    page = Path(write_report(write(tmp_path, {"sweep.json": found})).out).read_text()
    text = readable(page)
    assert "wikitext word perplexity wikitext bits per byte" in text
    assert "wikitext word perplexity 30.500, wikitext bits per byte 0.875" in text
    assert "wikitext word_perplexity ↓" in text
    grid = tables.main_grid(SweepRecord.from_json(found), latex=False)
    assert grid.baseline[:4] == ("110.00", "30.50", "0.100", "--")
    assert len(grid.baseline) == sum(len(titles) for _, titles in grid.groups), (
        "the uncut model stands under every group"
    )
    assert dict(grid.lines)["L1"][:2] == ("<u>565.00</u>", "<u>34.50</u>")  # of key dim 2
    header, first, *_ = tables.as_csv(SweepRecord.from_json(found).rows).splitlines()
    assert header.endswith("tokens,words,bytes,wikitext word_perplexity,wikitext bits_per_byte")
    assert first.endswith("4096,2048,10240,31.5,0.875")


def test_violated_bounds_are_said_in_bad_colours(tmp_path, unpainted):
    bad = trace()
    bad["bounds"]["violations"] = 3
    page = Path(write_report(write(tmp_path, {"trace.json": bad})).out).read_text()
    assert 'class="badge bad">3</strong> of 16 sampled states are outside of any bound.' in page


def test_a_page_that_cannot_be_written_is_one_line(tmp_path, unpainted):
    records = write(tmp_path, {"trace.json": trace()})
    (tmp_path / "taken").mkdir()
    (tmp_path / "thesis.html").write_text("years of work")
    os.mkfifo(tmp_path / "pipe")
    refusals = {"taken": "is a folder", "pipe": "is a pipe", "thesis.html": "is no page that slimstate wrote"}
    for name, why in refusals.items():
        with pytest.raises(OutputError, match=f"{name} {why}"):
            write_report(records, tmp_path / name)
    assert (tmp_path / "thesis.html").read_text() == "years of work"
    for _ in range(2):  # a page of ours is replaced
        assert write_report(records, tmp_path / "page.html").bytes


@pytest.mark.slow
def test_a_big_model_makes_a_page_under_three_megabytes(tmp_path):
    size = {"layers": 24, "heads": 16}
    cuts = [None, cut("l1", 128, 64), cut("drrqr", 128, 64)]
    records = {f"trace-{i}.json": trace(f"m{i}", by, **size, width=64 if by else 128) for i, by in enumerate(cuts)}
    records["filters.json"] = filters(heads=16, width=128)
    records |= {f"{i}/{PLAN}": plan(**size, width=128, key_dim=64) for i in range(6)}
    records |= {"sweep.json": sweep(), "evaluation.json": evaluation()}
    made = write_report(write(tmp_path, records))
    assert made.skipped == ()
    assert made.bytes < 3_000_000
    assert "left out to keep the page small" in Path(made.out).read_text()


def test_figures_round_where_things_are_and_not_what_they_say():
    flat = TraceRecord.from_json({**trace(), "curve": [0.19] * 16})
    drawn = plots.svg(plots.utilisation_curves([flat]), "x")
    assert {"0.025", "0.075"} <= set(re.findall(r">(0\.\d+)</text>", drawn))
    assert not re.search(r' d="[^"]*\d\.\d{3}', drawn)


@pytest.mark.slow
def test_of_many_states_a_share_is_drawn_and_said_to_be_and_all_where_one_is_outside():
    many = trace(layers=20, heads=8)
    states = many["bounds"]["states"]
    assert states > plots.STATES_DRAWN
    for violations, drawn in ((0, range(1, plots.STATES_DRAWN + 1)), (1, [states])):
        many["bounds"]["violations"] = violations
        record = TraceRecord.from_json(many)
        dots = plots.retrieval([record]).axes[0].lines[1]
        assert len(dots.get_xdata()) in drawn
    assert "an even share of them is drawn" in state_section([Found(path=Path("x"), record=record)]).body


def test_the_page_asks_for_nothing_from_elsewhere(whole):
    page = whole.read_text()
    addresses = set(re.findall(r"https?://[^\s\"'<>)]+", page))
    assert addresses <= {"http://www.w3.org/1999/xlink", "http://www.w3.org/2000/svg"}
    assert not re.search(r"(?:src|href)=\"(?!#|data:)", page)
    assert "@import" not in page
    assert "default-src 'none'" in page


@pytest.mark.slow
def test_making_a_report_needs_neither_torch_nor_transformers(tmp_path):
    write(tmp_path, {"trace.json": trace(), "evaluation.json": evaluation()})
    code = f"""
import sys, slimstate
slimstate.report({str(tmp_path)!r})
print(sorted({{"torch", "transformers", "fla", "safetensors"}} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_runs_and_paths_cover_the_kept_channels_and_no_other():
    kept = [0, 1, 4, 6, 7]
    assert list(runs(kept)) == [(0, 2), (4, 1), (6, 2)]
    assert strip_path(kept, 2) == "M0 2h2m2 0h1m1 0h2"
    assert list(runs([])) == []


def test_numbers_are_written_for_people():
    assert [magnitude(x) for x in (None, 1.234, 12345.6, 1.5e7)] == ["∞", "1.23", "12,346", "1.5e+07"]
    assert [brief(x) for x in (None, 5.44, 103.2, 65580.0, 2.1e6, 3e15)] == ["∞", "5.4", "103", "66k", "2M", "3e15"]
    assert [fixed(x, 1) for x in (None, -1.3, -0.01, 1234.5)] == ["–", "−1.3", "0.0", "1,234.5"]
    assert [mebibytes(x) for x in (2**17, 2**20, 3 * 2**30)] == ["0.125", "1.00", "3,072.00"]


def test_colours_go_from_dark_to_bright_and_stay_within_the_scale():
    scale = Scale(low=1, high=10_000, logarithmic=True)
    assert scale.share(100) == pytest.approx(0.5)
    assert scale.colour(0.001) == scale.colour(1)
    assert scale.colour(1)[1]
    assert not scale.colour(1e9)[1]
    assert Scale(low=2, high=2).share(2) == 0.5


@pytest.fixture(scope="module")
def desktop(browser: Any, whole: Path) -> Any:
    """The page in a wide window, with what went wrong and what it asked for."""
    page = browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce").new_page()
    page.wrong, page.asked = [], []
    page.on("console", lambda message: page.wrong.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: page.wrong.append(str(error)))
    page.on("request", lambda request: page.asked.append(request.url))
    page.goto(whole.as_uri())
    return page


def channels_of(colour: str) -> list[float]:
    return [float(part) for part in re.findall(r"[\d.]+", colour)[:3]]


def luminance(colour: str) -> float:
    linear = [
        (c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4) for c in channels_of(colour)
    ]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    dark, bright = sorted((luminance(one), luminance(other)))
    return (bright + 0.05) / (dark + 0.05)


def style(page: Any, selector: str, name: str) -> str:
    return page.eval_on_selector(selector, f"element => getComputedStyle(element).{name}")


def test_the_page_opens_without_a_complaint_and_without_a_request(desktop, whole):
    assert desktop.wrong == []
    assert [url for url in desktop.asked if not url.startswith("data:")] == [whole.as_uri()]
    boxes = desktop.eval_on_selector_all(
        "figure svg.drawing",
        "all => all.map(one => [one.getBoundingClientRect().width, one.getBoundingClientRect().height])",
    )
    assert len(boxes) == 8
    assert all(width > 400 and height > 100 for width, height in boxes)


def column(page: Any, number: int) -> list[str]:
    return page.eval_on_selector_all(
        "#trade-off table.sortable tbody tr", f"rows => rows.map(row => row.cells[{number}].dataset.value ?? '')"
    )


def test_a_header_sorts_numbers_both_ways_and_what_is_unknown_stays_last(desktop):
    header = desktop.locator("#trade-off table.sortable th", has_text="perplexity per token")
    for direction, sign in (("ascending", 1), ("descending", -1)):
        header.locator("button").click()
        assert header.get_attribute("aria-sort") == direction
        found = [sign * float(value) for value in column(desktop, 5)]
        assert found == sorted(found)
        assert len(set(found)) > 5
    median = desktop.locator("#trade-off table.sortable th", has_text="median")
    for _ in range(2):
        median.locator("button").click()
        assert column(desktop, 10)[-2:] == ["", ""]
    assert header.get_attribute("aria-sort") == "none"


def test_a_header_sorts_words_by_the_keyboard(desktop):
    button = desktop.locator("#trade-off table.sortable th button").first
    button.focus()
    for direction in (1, -1):
        desktop.keyboard.press("Enter")
        found = column(desktop, 0)
        assert found == sorted(found, reverse=direction < 0)
        assert {"drrqr", "random"} <= set(found)


def test_pointing_at_a_point_of_the_figure_tells_what_it_is(desktop):
    row = sweep()["rows"][3]
    point = desktop.locator("#pareto-point-3")
    point.scroll_into_view_if_needed()
    box = point.bounding_box()
    desktop.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    tip = desktop.locator("#tooltip")
    assert tip.is_visible()
    assert tip.inner_text().split("\n") == [
        f"{row['method']} ({row['score']}), key dim {row['key_dim']}",
        f"perplexity {row['perplexity']:.2f} per token, {row['word_perplexity']:.2f} per word, 1.250 bits per byte",
        f"{row['nats_over_uncut']:+.3f} nats per token over uncut",
        "state 0.5 MiB, 75% less",
    ]
    assert desktop.locator("tr.lit").get_attribute("data-point") == "pareto-point-3"
    desktop.mouse.move(5, 450)
    assert tip.is_hidden()


def test_pointing_at_a_cell_of_a_map_tells_its_value(desktop):
    cell = desktop.locator(".heat").first.locator("tbody tr").nth(1).locator("td").nth(0)
    cell.scroll_into_view_if_needed()
    cell.hover()
    value = trace()["utilisation_by_head"][1][0]
    expected = f"layer 1, head 0: utilisation {value:.3f}"
    assert desktop.locator("#tooltip").inner_text().startswith(expected)
    assert cell.get_attribute("aria-label").startswith(expected)


def test_arrows_walk_through_a_map_and_escape_hides_the_tip(desktop):
    desktop.mouse.move(0, 0)
    first = desktop.locator(".heat").first.locator("tbody td").first
    first.focus()
    desktop.keyboard.press("ArrowRight")
    desktop.keyboard.press("ArrowDown")
    tip = desktop.locator("#tooltip")
    assert tip.inner_text().startswith("layer 1, head 1:")
    desktop.keyboard.press("Escape")
    assert tip.is_hidden()


def test_pointing_at_a_strip_tells_the_channel(desktop):
    kept = plan()["layers"]["0"]["keep"][1]
    strip = desktop.locator(".strip svg").first
    strip.scroll_into_view_if_needed()
    box = strip.bounding_box()
    for channel in range(8):
        desktop.mouse.move(box["x"] + (channel + 0.5) * box["width"] / 8, box["y"] + box["height"] * 0.75)
        state = "kept" if channel in kept else "removed"
        assert desktop.locator("#tooltip").inner_text().endswith(f"channel {channel}: {state}")


def test_the_copy_buttons_answer_with_and_without_a_clipboard(desktop):
    expect = pytest.importorskip("playwright.sync_api").expect
    answer = re.compile("Copied|Selected")
    desktop.locator(".copy").nth(0).click()
    expect(desktop.locator(".copy").nth(0)).to_have_text(answer)
    desktop.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    desktop.locator(".copy").nth(1).click()
    expect(desktop.locator(".copy").nth(1)).to_have_text(answer)
    assert desktop.evaluate("getSelection().toString()").startswith("import fla")
    assert desktop.wrong == []


def test_a_phone_scrolls_down_only_and_shows_tips_on_a_tap(browser, whole):
    page = browser.new_context(viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True).new_page()
    page.goto(whole.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    cell = page.locator(".heat td[data-tip]").first
    cell.scroll_into_view_if_needed()
    cell.tap()
    assert page.locator("#tooltip").inner_text().startswith("layer 0, head 0:")
    box = page.locator("#tooltip").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 360
    page.close()


@pytest.mark.slow
def test_the_dark_scheme_turns_page_text_and_figures(browser, whole):
    seen = {}
    for scheme in ("light", "dark"):
        page = browser.new_context(color_scheme=scheme).new_page()
        page.goto(whole.as_uri())
        paper, text = style(page, "figure", "backgroundColor"), style(page, "figure svg.drawing text", "fill")
        seen[scheme] = style(page, "body", "backgroundColor")
        assert contrast(seen[scheme], style(page, "body", "color")) > 10
        assert contrast(paper, text) > 10
        assert contrast(paper, style(page, "figcaption", "color")) > 4.5
        for deep in (".heat td.deep", ".heat td[data-tip]:not(.deep):not(.none)"):
            assert contrast(style(page, deep, "backgroundColor"), style(page, deep, "color")) > 3
        page.close()
    assert luminance(seen["light"]) > 0.8
    assert luminance(seen["dark"]) < 0.05


def test_paper_gets_no_bars_no_tips_and_light_colours(browser, whole):
    page = browser.new_context(viewport={"width": 690, "height": 980}, color_scheme="dark").new_page()
    page.goto(whole.as_uri())
    page.locator("#pareto-point-0").focus()
    page.emulate_media(media="print")
    assert page.locator(".toc").is_hidden()
    assert page.locator("#tooltip").is_hidden()
    assert page.locator(".copy").first.is_hidden()
    assert luminance(style(page, "body", "backgroundColor")) > 0.9
    assert luminance(style(page, "body", "color")) < 0.05
    assert style(page, "figure", "breakInside") == "avoid"
    assert page.evaluate("document.documentElement.scrollWidth") <= 690
    page.close()


@pytest.mark.parametrize(("library", "registered"), [("fla", True), ("transformers", False), (None, True)])
def test_how_to_load_depends_on_where_the_class_is(library, registered):
    loader = None if library is None else StockClass(library=library, name="AutoModelForImageTextToText")
    source = Provenance(path=Path("sweep.json"), kind="sweep", model="m", base="m", loader=loader, versions={})
    section = reproduce_section([source], Records(), Path())
    assert ("import fla" in str(section.body)) == registered
    assert ("ImageTextToText" in str(section.body)) == (library is not None)
