"""Word perplexity is that of lm-eval's task `wikitext`, and only WikiText has one."""

import json
import math
import re
import shutil
from dataclasses import replace

import pytest

import slimstate
import tiny
from recoveries import Listener
from slimstate.evaluation.wikitext import WikiText, add_words, read_pages, read_wikitext
from slimstate.models.load import load
from slimstate.records.parts import TextScores
from slimstate.reports.tables import grid_caption
from slimstate.system.errors import DataError
from slimstate.system.json_files import read_json, write_json
from slimstate.system.progress import SILENT

pytestmark = pytest.mark.slow
NAME = tiny.PLAIN[0]
PAGES = [
    f' = {title} = \n \n The well @-@ known {title} ( 1986 ) , by " A . Author " : 1 @,@ 000 words . \n'
    " = = Section = = \n \n It 's more text ; " + "and more words of it . " * 12 + "\n "
    for title in ("First", "Second = third", "Größe")
]
TEXTS = [
    ("plain.txt", "No heading.\n = Heading = \n text", False, None),
    *((name, "No heading at all.\n" * 9, False, "no heading") for name in ("wikitext.txt", "wiki2-test.txt")),
    ("wikipedia.txt", "No heading at all.\n" * 9, False, None),
    ("wikitext.txt", "The end of a page.\n = Heading = \n text", True, None),
    ("article.txt", "\n\n = Heading = \n text", True, None),
    ("article.txt", "= = Section = = \n text", False, None),
    ("article.txt", "\ufeff = Heading = \n text", True, None),
]


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    """A text and the same pages as lm-eval's dataset has them."""
    folder = tmp_path_factory.mktemp("wikitext")
    (folder / "wiki.test.raw").write_text(" \n" + "\n".join(PAGES), encoding="utf-8")
    (folder / "wikitext.jsonl").write_text("".join(json.dumps({"page": page}) + "\n" for page in PAGES))
    return folder / "wiki.test.raw"


def test_pages_start_at_first_level_headings(raw, tmp_path):
    assert list(read_pages(str(raw))) == PAGES
    rows = [line if line.endswith("\n") else f"{line}\n" for line in raw.read_text().splitlines(keepends=True)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    assert [page.rstrip() for page in read_pages(str(tmp_path / "rows.jsonl"))] == [page.rstrip() for page in PAGES]
    for end in ("", "\n"):  # rows that are pages stay as they are
        (tmp_path / "pages.jsonl").write_text("".join(json.dumps({"text": page + end}) + "\n" for page in PAGES))
        assert list(read_pages(str(tmp_path / "pages.jsonl"))) == [page + end for page in PAGES]
    assert list(read_pages(str(raw.with_name("wikitext.jsonl")))) == PAGES  # as lm-eval's own dataset has them
    (tmp_path / "wiki.end.raw").write_text("\n\nThe end of a page.\n = Heading = \n text")  # as lm-eval divides it
    assert list(read_pages(str(tmp_path / "wiki.end.raw"))) == ["\n\nThe end of a page.", " = Heading = \n text"]


@pytest.mark.parametrize("options", [{}, {"max_length": 48}])
def test_text_and_task_have_the_same_word_perplexity(folders, raw, options):
    task = {"tasks": ["wikitext"], "task_data": raw.parent, "progress": False}
    record = slimstate.evaluate(folders[NAME], raw, length=64, **task, **options)
    scores = record.lm_eval.tasks["wikitext"].metrics
    assert record.word_perplexity == pytest.approx(scores["word_perplexity"], rel=1e-6)
    assert record.words == sum(len(re.split(r"\s+", page)) for page in PAGES)
    assert f"over {record.words} words" in record.counts


def test_the_error_is_over_the_pages_that_were_scored(folders, raw):
    scores = {"tasks": ["wikitext"], "task_data": raw.parent, "progress": False, "length": 64}
    size = sum(len(tiny.tokenizer()(page)["input_ids"]) for page in PAGES[:2])
    record = slimstate.evaluate(folders[NAME], raw, max_tokens=size, **scores)
    assert record.page_words == tuple(len(re.split(r"\s+", page)) for page in PAGES[:2])
    first = slimstate.evaluate(folders[NAME], raw, limit=1, **scores).lm_eval.tasks["wikitext"].metrics
    assert math.exp(record.page_nats[0] / record.page_words[0]) == pytest.approx(first["word_perplexity"], rel=1e-6)
    assert record.word_perplexity == pytest.approx(math.exp(sum(record.page_nats) / record.words), rel=1e-12)
    measure = next(measure for measure in record.measures() if measure.name == "word perplexity")
    pages = zip(record.page_nats, record.page_words, strict=True)
    away = [nats - math.log(record.word_perplexity) * words for nats, words in pages]
    assert measure.error == pytest.approx(record.word_perplexity * math.sqrt(2) * math.hypot(*away) / record.words)


def test_a_page_alone_has_no_error_and_says_so(folders, raw, succeed):
    words = ("eval", folders[NAME], "--text", raw, "--length", 64, "--max-length", 64, "--max-tokens")
    note = "as lm-eval's wikitext (1 page, too few for a standard error)\n"
    assert [note in succeed(*words, tokens) for tokens in (64, 4096)] == [True, False]


def test_sweep_measures_every_cut_in_the_same_unit(folders, raw, tmp_path):
    options = {"text": raw, "text_length": 64, "methods": ["l1"], "key_dims": [16], "progress": False}
    record = slimstate.sweep(folders[NAME], tmp_path / "out", **options)
    slimstate.prune(folders[NAME], tmp_path / "cut", key_dim=16, method="l1", progress=False)
    cut = slimstate.evaluate(tmp_path / "cut", raw, length=64, baseline=folders[NAME], progress=False)
    assert record.rows[0].word_perplexity == pytest.approx(cut.word_perplexity, rel=1e-3)
    assert record.uncut.word_perplexity == pytest.approx(cut.baseline.word_perplexity, rel=1e-6)
    assert "word perplexity" in {row.measure for row in cut.compared}
    changes = [here - there for here, there in zip(record.rows[0].page_nats, record.uncut.page_nats, strict=True)]
    words, mean = record.uncut.page_words, sum(changes) / sum(record.uncut.page_words)
    away = [change - mean * size for change, size in zip(changes, words, strict=True)]
    error = 100 * math.sqrt(len(PAGES) / (len(PAGES) - 1)) * math.hypot(*away) / sum(words)
    assert f"ratio to the baseline: at most {error:.2g} %." in grid_caption(record)
    old = replace(record, uncut=replace(record.uncut, page_nats=(), page_words=()))
    assert "error" not in grid_caption(old)


def test_a_sweep_of_other_pages_is_not_continued(folders, raw, tmp_path):
    options = {"text": raw, "text_length": 60, "methods": ["l1"], "key_dims": [16], "progress": False}
    size = sum(len(tiny.tokenizer()(page)["input_ids"]) for page in PAGES[:2])
    slimstate.sweep(folders[NAME], tmp_path, max_tokens=size - 1, **options)
    with pytest.raises(DataError, match="another wikitext"):  # the same windows, and one more page
        slimstate.sweep(folders[NAME], tmp_path, max_tokens=size, **options)


def test_as_many_pages_are_measured_as_fit(raw):
    tokenizer = tiny.tokenizer()
    sizes = [len(tokenizer(page)["input_ids"]) for page in PAGES]
    for max_tokens, count in ((1, 1), (sizes[0], 1), (sum(sizes[:2]) - 1, 1), (sum(sizes[:2]), 2), (10**6, 3)):
        wikitext = read_wikitext(str(raw), tokenizer, SILENT, max_tokens=max_tokens)
        assert len(wikitext.pages) == count


@pytest.mark.parametrize(("name", "text", "has_pages", "line"), TEXTS)
def test_only_wikitext_has_words(name, text, has_pages, line, tmp_path):
    listener = Listener()
    (tmp_path / name).write_text(text)
    wikitext = read_wikitext(str(tmp_path / name), tiny.tokenizer(), listener)
    assert (wikitext is not None) == has_pages
    assert bool(listener.lines) == (line is not None)
    assert all(line in each for each in listener.lines)


def test_a_tokenizer_without_special_tokens_has_no_word_perplexity_but_one_per_token(folders, raw, tmp_path, succeed):
    model = shutil.copytree(folders[NAME], tmp_path / "model")
    tokenizer = read_json(model / "tokenizer_config.json")
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    write_json(model / "tokenizer_config.json", {**tokenizer, **dict.fromkeys(names)})
    out = succeed("eval", model, "--text", raw, "--length", 64)
    assert "perplexity" in out
    assert "word perplexity" not in out


def test_a_perplexity_that_is_too_large_for_a_record_is_left_out(folders):
    """A page without spaces is one word, whose perplexity is larger than any float."""
    page, runtime = "= A =" + "x" * 2000, load(folders[NAME], device="cpu")
    assert add_words(TextScores(), WikiText(pages=(page,)), runtime).word_perplexity is None
    assert math.isfinite(add_words(TextScores(), WikiText(pages=tuple(PAGES)), runtime).word_perplexity)
