"""Numbers on the pages are those of the records they name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from places import ROOT
from slimstate.records.benchmark import DecodeRecord, MixerRecord, ModelRecord
from slimstate.records.sweep import SweepRecord
from slimstate.system.json_files import read_json

DOCS, RECORDS = ROOT / "docs", ROOT / "docs" / "records"
PUBLISHED, PERFORMANCE = ((DOCS / name).read_text(encoding="utf-8") for name in ("AS_PUBLISHED.md", "PERFORMANCE.md"))


def table_after(page: str, words: str) -> dict[str, list[str]]:
    """The first table behind these words: its lines by their first cell."""
    lines = page[page.index(words) :].splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return {row[0]: row[1:] for row in rows if not set(row[0]) <= set("-")}


def word_ratios(name: str, *kinds: str) -> dict[tuple[str, int], str]:
    found = {}
    for kind in kinds:
        sweep = SweepRecord.read(RECORDS / f"sweep-{name}-{kind}.json")
        for row in sweep.rows:
            found[row.method, row.key_dim] = f"{row.word_perplexity / sweep.uncut.word_perplexity:.3f}"
    return found


@pytest.mark.parametrize(
    ("words", "name", "corrected"),
    [
        ("Gated DeltaNet 31M, uncut", "gated_deltanet-31m", ("main", "exact")),
        ("DeltaNet 30M, uncut", "delta_net-30m", ("main",)),
    ],
)
def test_both_columns_of_the_norm_epsilon_are_those_of_the_sweeps(words, name, corrected):
    table = table_after(PUBLISHED, words)
    head = table.pop("method")
    kinds = {"corrected": word_ratios(name, *corrected), "as published": word_ratios(name, "kept")}
    for method, cells in table.items():
        for title, cell in zip(head, cells, strict=True):
            key_dim, kind = title.split(": ")
            assert cell == kinds[kind].get((method, int(key_dim)), "not measured"), (method, title)
    uncut = SweepRecord.read(RECORDS / f"sweep-{name}-main.json").uncut
    assert f"{words} {uncut.word_perplexity:.1f} per word ({uncut.perplexity:.2f} per token)" in PUBLISHED


def test_gated_models_are_those_of_the_record():
    table = table_after(PERFORMANCE, "bench-model-gated.json")
    record = ModelRecord.read(RECORDS / "bench-model-gated.json")
    for size in ("370M", "1.3B"):
        rows = {row.key_dim: row for row in record.rows if row.model == f"gated_deltanet-{size.lower()}"}
        expected = [f"{1000 * rows[256].seconds:.1f}"]
        for key_dim in (128, 64, 32):
            expected += [f"{rows[key_dim].speedup:.2f}x", f"{rows[key_dim].memory_ratio:.2f}"]
        assert table[f"Gated DeltaNet {size}"][:7] == expected


def test_mixers_without_a_gate_are_those_of_the_record():
    table = table_after(PERFORMANCE, "bench-mixer-no-gate.json")
    record = MixerRecord.read(RECORDS / "bench-mixer-no-gate.json")
    for title, model in (("DeltaNet", "delta_net"), ("Gated DeltaNet, no gate", "gated_deltanet")):
        rows = {row.key_dim: row for row in record.rows if row.model == model}
        expected = [f"{1000 * rows[128].seconds:.2f} ms, {rows[128].peak_bytes / 2**30:.2f} GiB"]
        for key_dim in (64, 32, 16):
            expected += [f"{rows[key_dim].speedup:.2f}x", f"{rows[key_dim].memory_ratio:.3f}"]
        assert table[title] == expected


def test_decoding_of_the_published_shape_is_that_of_the_record():
    record = DecodeRecord.read(RECORDS / "bench-decode-gated.json")
    rows = {row.key_dim: row for row in record.rows if row.batch == 1024}
    line = next(line for line in PERFORMANCE.splitlines() if line.startswith("at B = 1024 a step takes"))
    for key_dim in (256, 128, 64):
        assert f"{1000 * rows[key_dim].seconds:.1f} ms at" in line
    assert f"({rows[128].speedup:.2f}x)" in line
    assert f"({rows[64].speedup:.2f}x)" in line
    assert all(f"{entry.batch:,}" in line for entry in record.largest_batch)


def test_every_record_that_a_page_names_is_there():
    for page in DOCS.rglob("*.md"):
        for name in re.findall(r"records/([\w.-]+\.json)", page.read_text(encoding="utf-8")):
            assert Path(RECORDS / name).is_file(), f"{page.name} names {name}"


def test_recurrences_on_a_cpu_are_those_of_the_record():
    record = read_json(RECORDS / "recurrences.json")
    table = table_after(PERFORMANCE, "records/recurrences.json")
    tokens = record["length"] / 1000
    for row in record["rows"]:
        seconds, peak = row["seconds"], row["peak_bytes"]
        cells = table[f"{row['family']}, {row['width']}"]
        expected = []
        for way in ("forward", "with gradients"):
            naive, chunked, plain = (
                seconds[f"{kind}, {way}"] for kind in ("token by token", "chunked", "plain products")
            )
            expected += [f"{tokens / naive:.1f}", f"{tokens / chunked:.1f}", f"{naive / chunked:.0f}x"]
            expected.append(f"{tokens / plain:.0f}")
        mebibytes = (peak[f"chunked, {way}"] / 2**20 for way in ("forward", "with gradients"))
        assert cells == [*expected, *(f"{each:.1f}" for each in mebibytes), f"{row['inputs'] / 2**20:.1f}"]
        assert row["error"] < 1e-4


@pytest.mark.parametrize(("page", "name"), [("mlx-lm.md", "verify-mlx.json"), ("llama.cpp.md", "verify-llama.json")])
def test_what_engines_do_is_what_their_records_say(page, name):
    table = table_after((DOCS / "serving" / page).read_text(encoding="utf-8"), f"records/{name}")
    head = table.pop("model")
    rows = {(row["model"], str(row["key_dim"])): row for row in read_json(RECORDS / name)["rows"]}
    assert len(rows) == len(table) * len(head)
    for model, cells in table.items():
        for key_dim, cell in zip(head, cells, strict=True):
            row = rows[model, key_dim]
            measured = "" if row["verdict"] == "refuses" else f" {max(row['prefill'], row['decoding']):.0e}"
            assert cell == row["verdict"] + measured, (model, key_dim)
