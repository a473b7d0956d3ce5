"""Tasks against numbers computed by hand, and against lm-eval's own command in a process of its own."""

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from tokenizers.processors import TemplateProcessing

import tiny
from launching import Program
from recoveries import Listener
from slimstate.evaluation import lm_eval, task_sources
from slimstate.evaluation.options import TaskOptions
from slimstate.evaluation.recall_tasks import prompts
from slimstate.evaluation.task_sources import PAPER, RECALL, resolve_tasks
from slimstate.models.load import Runtime, load
from slimstate.records import schema
from slimstate.records.evaluation import LmEval, TaskScores
from slimstate.system.errors import DataError, SlimstateError
from slimstate.system.progress import SILENT

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.slow  # lm-eval itself takes seconds to load

# lm-eval's command on a stock folder, once for each list of arguments; it also writes the names in lm-eval's own index,
# which takes ten seconds and is therefore done once, with each included file read once
DRIVER = """
import json, pathlib, sys
import slimstate.evaluation.lm_eval
assert "lm_eval" not in sys.modules
slimstate.prepare_fla()
from lm_eval.__main__ import cli_evaluate
from lm_eval.tasks import TaskManager, _yaml_loader
index, load = TaskManager.__init__, _yaml_loader.load_yaml
names, included = pathlib.Path(sys.argv[2]), {}
def load_included(path, *, resolve_func, **_):
    if (path, resolve_func) not in included:
        included[path, resolve_func] = load(path, resolve_func=resolve_func)
    return dict(included[path, resolve_func])
_yaml_loader.load_yaml = load_included
def index_once(self, *arguments, **options):
    index(self, *arguments, **options, include_defaults=not names.exists())
    if not names.exists():
        names.write_text(json.dumps(self.all_subtasks))
TaskManager.__init__ = index_once
for arguments in json.loads(sys.argv[1]):
    sys.argv[1:] = arguments
    cli_evaluate()
"""
QUESTIONS = [
    {"question": f"Which {word} is it?", "choices": {"text": ["a state", "keys", "one long row"], "label": list("ABC")}}
    for word in ("head", "rule", "layer", "channel", "token", "row")
]
LISTED = [{"context": "Ada made it. Who made it?", "question": "Who made it?", "answers": ["Ada", "Countess"]}]
KEYED = [{"text": "Device: a pump. Maker: Acme.\nmaker:", "key": "maker", "value": "Acme"}]
NUMBERS = " ".join(f"n{number:04}" for number in range(1000))  # of 5999 characters
QUESTION = ". Who made it?"
ROOM = 2048 - len(QUESTION)  # for the document, at one token per character
LONG = {"context": f"{NUMBERS[:2999]} Adalbert {NUMBERS[3000:]}", "question": "Who made it?"}
TRUNCATED = {
    "recall_nq": f"{LONG['context'][3000 - ROOM // 2 : 3000 + ROOM // 2].strip()}{QUESTION}",
    "recall_drop": f"{NUMBERS[:ROOM].strip()}{QUESTION}",
}
DOCUMENTS: dict[str, list[dict[str, Any]]] = {
    "wikitext": [{"page": tiny.text(700)}, {"page": tiny.text(90, seed=1)}],
    "lambada_openai": [{"text": "the key of the head meets the query"}, {"text": "a rule with one state"}],
    "arc_easy": [{**row, "answerKey": key} for row, key in zip(QUESTIONS, "ABCABC", strict=True)],
    "arc_challenge": [{**row, "answerKey": key} for row, key in zip(QUESTIONS, "CABCAB", strict=True)],
    "hellaswag": [
        {"ctx_a": "A head reads.", "ctx_b": "it", "activity_label": "Reading", "label": label}
        | {"endings": ["on", "a key", "b", "it all"]}
        for label in "0123"
    ],
    "winogrande": [
        {"sentence": "The key left the box as _ was full.", "answer": answer}
        | {"option1": "the key", "option2": "the box"}
        for answer in "12"
    ],
    "piqa": [{"goal": "Open a jar", "sol1": "turn the lid", "sol2": "wait", "label": label} for label in (0, 1, 1)],
    "recall_drop": LISTED,
    "recall_fda": KEYED,
    "recall_nq": LISTED,
    "recall_squad": [{"text": "Ada made the engine. The engine was made by", "value": "Ada"}],
    "recall_swde": KEYED,
    "recall_triviaqa": LISTED,
}
SHAPES = {
    "recall_fda": lambda body, answer: {"text": f"{body}\nmaker:", "key": "maker", "value": answer},
    "recall_swde": lambda body, answer: {"text": f"{body} {prompts.SUMMARY} maker:", "key": "maker", "value": answer},
    "recall_squad": lambda body, answer: {"text": f"{body}. Maker:", "value": answer},
    "recall_nq": lambda body, answer: {"context": body, "question": "Maker:", "answers": [answer, "n0500"]},
    "recall_drop": lambda body, answer: {"context": body, "question": "Maker:", "answers": [answer]},
    "recall_triviaqa": lambda body, answer: {"context": f"[DOC]{body}", "question": "Maker:", "answers": [answer]},
}
PROMPTS = [
    (prompts.fda, {"text": "A pump.\nMaker: Acme\nmaker:", "key": "maker"}, "A pump.\nMaker: Acme. Maker:"),
    (prompts.swde, {"text": "Film. \nSummary of information above... year:", "key": "year"}, "Film. Year:"),
    (prompts.swde, {"text": "Film of 1999 year:", "key": "year"}, "Film of 1999. Year:"),
    (prompts.squad, {"text": " Ada made the engine. It was made by "}, "Ada made the engine. It was made by"),
    (prompts.question, {"context": "Ada did. WHO DID? ", "question": "Who did?"}, "Ada did. Who did?"),
    (prompts.triviaqa, {"context": "[DOC] [TLE] Ada [PAR] did", "question": "Who?"}, "Ada  did. Who?"),
]
UNKNOWN_TASKS = [
    ("arc_easi", "unknown task 'arc_easi' (groups of tasks are not supported); nearest: arc_easy"),
    ("piqa,papre", "nearest: paper"),
    ("qqqqqqqqqqqqqqqq", "`lm_eval ls subtasks` lists them"),
    (" , ", "no task is named"),
]


def run_tasks(runtime: Runtime, tasks: Sequence[str], data: Path | None = None, **options: Any) -> LmEval:
    reporter = options.pop("reporter", SILENT)
    return lm_eval.run_tasks(runtime, TaskOptions(tasks=tasks, task_data=data, **options), reporter=reporter)


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def runtime(folders) -> Runtime:
    return load(folders[tiny.PLAIN[0]], device="cpu")


@pytest.fixture(scope="module")
def data(runtime, tmp_path_factory) -> Path:
    """The long documents have a second answer: what the model writes after the prompt that is truncated by hand."""
    folder = tmp_path_factory.mktemp("task-data")
    for name, rows in DOCUMENTS.items():
        write(folder / f"{name}.jsonl", rows)
    for name, text in TRUNCATED.items():
        answer = generate(runtime, tokens(runtime, text), length=8)[1:].swapcase()
        assert len(answer) > 4
        write(folder / f"{name}.jsonl", [*DOCUMENTS[name], {**LONG, "answers": ["Adalbert", answer]}])
    return folder


@contextmanager
def watched(runtime: Runtime) -> Iterator[list[str]]:
    """Collect the prompts that the model reads, of which some may be padded."""
    seen: list[str] = []
    generate = runtime.model.generate

    def generate_and_collect(*, input_ids: torch.Tensor, **options: Any) -> torch.Tensor:
        seen.extend(runtime.tokenizer.batch_decode(input_ids))
        return generate(input_ids=input_ids, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime.model, "generate", generate_and_collect)
        yield seen


@pytest.fixture(scope="module")
def run(runtime, data) -> tuple[LmEval, list[str]]:
    """Run all tasks: the record, and the prompts of the recall tasks."""
    with watched(runtime) as seen:
        return run_tasks(runtime, ("paper", "recall"), data=data), seen


@pytest.fixture(scope="module")
def record(run) -> LmEval:
    return run[0]


def tokens(runtime: Runtime, text: str) -> list[int]:
    return list(runtime.tokenizer(text, add_special_tokens=False)["input_ids"])


@torch.inference_mode()
@pytest.mark.parametrize("window", [256, 96])
def test_word_perplexity_comes_from_the_log_likelihood_of_whole_pages(window, runtime, record, data):
    """Windows have 256 tokens, the model's context, or `max_length`; each token counts once, and all are full."""
    total, words = 0.0, 0
    if window != 256:
        record = run_tasks(runtime, ["wikitext"], data=data, max_length=window)
        assert record.max_length == window
    for row in DOCUMENTS["wikitext"]:
        ids = [runtime.tokenizer.bos_token_id, *tokens(runtime, row["page"].replace(" \n", "\n").replace("\n ", "\n"))]
        for start in range(1, len(ids), window):
            end = min(start + window, len(ids))
            seen, scored = torch.tensor([ids[max(0, end - window - 1) : end]]), end - start
            scores = runtime.model(input_ids=seen[:, :-1]).logits[0, -scored:].double().log_softmax(-1)
            total += float(scores.gather(1, seen[0, -scored:, None]).sum())
        words += len(row["page"].split())
    assert record.tasks["wikitext"].metrics["word_perplexity"] == pytest.approx(math.exp(-total / words), rel=1e-4)
    assert record.tasks["wikitext"].higher_is_better["word_perplexity"] is False


def generate(runtime: Runtime, ids: list[int], length: int = 48) -> str:
    """Return the line that the model writes after a prompt: alone, without padding and without a recurrent state."""
    prompt, pad = torch.tensor([ids]), runtime.tokenizer.pad_token_id
    options = {"max_new_tokens": length, "do_sample": False, "use_cache": False, "pad_token_id": pad}
    whole = runtime.model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **options)
    return runtime.tokenizer.decode(whole[0, len(ids) :], skip_special_tokens=True).split("\n")[0]


def test_a_long_document_is_truncated_around_the_answer_or_to_its_beginning(run):
    """Half of the documents of these two tasks are long; the model writes the second answer if that is right."""
    record, seen = run
    assert sorted(text for text in seen if len(text) > 1000) == sorted(TRUNCATED.values())
    assert {len(text) for text in TRUNCATED.values()} == {2047}  # without a space at the end of the document
    for name in TRUNCATED:
        assert record.tasks[name].metrics == {"contains": 0.5}


def merging():
    """One token for " one" but three for "one", three for a Chinese character, and a special one in front of all."""
    tokenizer = tiny.tokenizer(("Ġ", "o"), ("Ġo", "n"), ("Ġon", "e"), ("Ġ", "n"), ("0", "1"), ("5", "0"))
    first = [("<|end|>", tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<|end|> $A", special_tokens=first)
    return tokenizer


def recall_task(name: str, path: Path, **metadata: Any) -> Any:
    """Return a task as lm-eval loads it, with local documents."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(task_sources.RECALL_FOLDER), include_defaults=False, metadata=metadata)
    options = {"data_files": {"validation": str(path)}, "cache_dir": str(path.parent / "cache")}
    member = {"task": name, "dataset_path": "json", "dataset_kwargs": options}
    return manager.load([{"group": "local", "task": [member]}])["tasks"][name]


@pytest.mark.parametrize("tokenizer", [tiny.tokenizer, merging])
@pytest.mark.parametrize("name", RECALL)
def test_the_question_and_the_answer_are_never_truncated(name, tokenizer, tmp_path):
    """The answer may lie anywhere, except in the tasks that keep the beginning."""
    body = NUMBERS.replace("7", "é漢")
    places = [0, 6, len(body) // 2, len(body) - 6, len(body)]
    bodies = [f"{body[:place]}Ångström{body[place:]}" for place in places]
    short = "n0001 Ångström n0002"
    path = write(tmp_path / "rows.jsonl", [SHAPES[name](text, "ångström") for text in (*bodies, short)])
    task = recall_task(name, path, tokenizer=tokenizer())
    *windows, untouched = [task.doc_to_text(document) for document in task.eval_docs]
    assert untouched == f"{short}. Maker:"
    for text, whole in zip(windows, bodies, strict=True):
        assert 2030 < len(tokenizer()(text)["input_ids"]) <= 2048
        window = text.removesuffix(". Maker:").removesuffix(" Maker:")
        assert window != text
        assert window in whole
        if name in ("recall_drop", "recall_triviaqa"):
            assert whole.startswith(window)
        else:
            assert "Ångström" in window
    if name not in ("recall_drop", "recall_triviaqa"):
        halves = [len(tokenizer()(half)["input_ids"]) for half in windows[2].split("Ångström")]
        assert abs(halves[0] - halves[1]) < 40


def test_the_window_lies_around_the_key_or_value_that_comes_first_or_at_the_end(tmp_path):
    rows = [
        {"text": NUMBERS.replace("n0300", "Maker").replace("n0900", "Acme"), "key": "maker", "value": "acme"},
        {"text": NUMBERS.replace("n0300", "Acme").replace("n0900", "Maker"), "key": "maker", "value": "acme"},
        {"text": NUMBERS, "key": "maker", "value": "acme"},
    ]
    task = recall_task("recall_fda", write(tmp_path / "rows.jsonl", rows), tokenizer=tiny.tokenizer())
    room = 2048 - len(". Maker:")
    by_key, by_value, neither = [task.doc_to_text(document) for document in task.eval_docs]
    for text, row in zip((by_key, by_value), rows, strict=False):
        assert text == f"{row['text'][1800 - room // 2 : 1800 + room // 2].strip()}. Maker:"
    assert neither == f"{NUMBERS[-room:].strip()}. Maker:"


def test_prompts_of_the_harness_have_half_of_their_window_before_the_answer(tmp_path):
    rows = [
        {"text": NUMBERS.replace("n0300", "Maker"), "key": "maker", "value": "acme"},
        {"text": NUMBERS[:1500] + " maker", "key": "maker", "value": "acme"},
        {"text": NUMBERS.replace("n0300", "Other"), "key": "maker", "value": "acme", "alt_answers": ["other"]},
        {"text": NUMBERS, "key": "maker", "value": "acme", "tok_pos": 1800},
        {"text": NUMBERS, "key": "maker", "value": "acme"},
    ]
    options = {"tokenizer": tiny.tokenizer(), "prompts": "harness"}
    task = recall_task("recall_fda", write(tmp_path / "rows.jsonl", rows), **options)
    around = [row["text"][1800 - 999 : 1800 + 999] for row in rows]
    around[1], around[4] = rows[1]["text"][1501 - 999 :], NUMBERS[-999:]  # although the second document would fit
    assert [task.doc_to_text(row) for row in rows] == [f"{text}. Maker:" for text in around]


def test_no_window_exceeds_its_limit_wherever_its_edges_fall():
    """Within a character, or at a word that has more tokens without the space before it."""
    from slimstate.evaluation.recall_tasks.task import prompt

    tokenizer, half = merging(), "one one 漢字 one one one漢 " * 20
    body = f"{half}Ada {half}".strip()
    for limit in range(20, 120):
        text = prompt(tokenizer, body, ". Maker:", ["ada"], limit)
        assert limit - 8 < len(tokenizer(text)["input_ids"]) <= limit
        assert text.removesuffix(". Maker:") in body
        assert "Ada" in text


def test_the_limit_is_exact_and_a_question_is_truncated_only_for_the_model(runtime, tmp_path):
    letters = NUMBERS.replace(" ", "-")
    fits, exceeds = letters[:ROOM], letters[: ROOM + 1]
    rows = [{"context": text, "question": "Who made it?", "answers": ["Ada"]} for text in (fits, exceeds)]
    rows.append({"context": "Ada did", "question": NUMBERS, "answers": ["Ada"]})
    path = write(tmp_path / "rows.jsonl", rows)
    texts = list(map(recall_task("recall_drop", path, tokenizer=tiny.tokenizer()).doc_to_text, rows))
    assert texts == [fits + QUESTION, fits + QUESTION, f". {NUMBERS}"]
    uncut = recall_task("recall_drop", path)
    assert uncut.doc_to_text(rows[1]) == exceeds + QUESTION
    write(tmp_path / "recall_drop.jsonl", rows[2:])
    with watched(runtime) as seen:
        run_tasks(runtime, ["recall_drop"], data=tmp_path)
    assert seen == [NUMBERS[-2048:]]


@pytest.mark.parametrize("name", RECALL)
def test_documents_with_an_answer_of_one_character_are_left_out_where_it_is_searched_for(name, tmp_path):
    rows = [SHAPES[name]("Ada is 7", answer) for answer in ("7", "Ada", "", "is")]
    if name in ("recall_fda", "recall_swde"):
        rows.append({**rows[1], "key": "k"})
    if name == "recall_nq":
        rows.append({**rows[1], "answers": []})
    task = recall_task(name, write(tmp_path / "rows.jsonl", rows))
    rows_left = (0, 1, 2, 3) if name in ("recall_drop", "recall_triviaqa") else (1, 3)
    assert list(task.eval_docs) == [rows[row] for row in rows_left]
    assert task.rows == rows_left


def test_documents_of_unequal_length_may_share_a_batch(runtime, data, record, tmp_path, monkeypatch):
    monkeypatch.setitem(lm_eval.BATCH, "cpu", 3)
    bodies = [tiny.text(length, seed=length).replace("\n", " ").strip() for length in (300, 30, 90)]
    answers = [generate(runtime, tokens(runtime, f"{body}. Name:"))[:12] for body in bodies]
    rows = [{"text": body, "key": "name", "value": answer} for body, answer in zip(bodies, answers, strict=True)]
    write(tmp_path / "recall_fda.jsonl", rows)
    assert run_tasks(runtime, ["recall_fda"], data=tmp_path).tasks["recall_fda"].metrics == {"contains": 1.0}
    together = run_tasks(runtime, PAPER, data=data).tasks
    for name in PAPER:
        assert together[name].metrics == pytest.approx(record.tasks[name].metrics, rel=1e-4)


def test_the_command_of_lm_eval_returns_the_same(folders, data, run, tmp_path):
    """The recall tasks apart, as their `max_length` would change word perplexity."""
    record, seen = run
    for name in DOCUMENTS:
        files = dict.fromkeys(("train", "validation", "test"), str(data / f"{name}.jsonl"))
        override = {"include": str(task_sources.task_files()[name]), "task": name, "dataset_path": "json"}
        override |= {"dataset_name": None, "dataset_kwargs": {"data_files": files}}
        (tmp_path / "local" / f"{name}.yaml").parent.mkdir(exist_ok=True)
        (tmp_path / "local" / f"{name}.yaml").write_text(json.dumps(override))  # JSON is YAML
    model = f"pretrained={folders[tiny.PLAIN[0]]},dtype=float32"
    common = ["--device", "cpu", "--batch_size", "1", "--seed", "0", "--include_path", str(tmp_path / "local")]
    common += ["--model", "hf", "--log_samples", "--output_path", str(tmp_path / "results")]
    runs = [["--tasks", ",".join(PAPER), "--model_args", model, *common]]
    runs += [["--tasks", ",".join(RECALL), "--model_args", f"{model},max_length=2096", *common]]
    (tmp_path / "driver.py").write_text(DRIVER)
    words = [tmp_path / "driver.py", json.dumps(runs), tmp_path / "names.json"]
    code = Program(*words, err=tmp_path / "said", HF_HOME=str(tmp_path / "hub")).wait()
    assert code == 0, (tmp_path / "said").read_text()[-2000:]
    assert set(json.loads((tmp_path / "names.json").read_text())) == set(task_sources.task_files())
    results: dict[str, Any] = {}
    for path in (tmp_path / "results").rglob("results*.json"):
        results |= json.loads(path.read_text())["results"]
    for name in DOCUMENTS:
        for metric, value in record.tasks[name].metrics.items():
            assert value == pytest.approx(results[name][f"{metric},none"], rel=1e-5), (name, metric)
        for metric, value in record.tasks[name].stderr.items():
            error = results[name][f"{metric}_stderr,none"]  # 0 where all documents are right, or none
            assert value == pytest.approx(error) if error else value > 0, (name, metric)
    samples = [path.read_text().splitlines() for path in (tmp_path / "results").rglob("samples_recall_*.jsonl")]
    sent = [json.loads(line)["arguments"]["gen_args_0"]["arg_0"] for lines in samples for line in lines]
    assert sorted(sent) == sorted(seen)


def test_the_averages_are_the_papers_and_need_all_their_tasks(record):
    normalised = {"arc_easy", "arc_challenge", "hellaswag", "piqa"}
    scores = {
        name: TaskScores(metrics={"acc": 2.0**n, "acc_norm": 3.0**n, "word_perplexity": 5.0, "contains": 7.0**n})
        for n, name in enumerate([*PAPER, *RECALL])
    }
    means, errors = lm_eval.averages(scores)
    assert errors == {}
    assert means["zero_shot"] == sum(3.0**n if name in normalised else 2.0**n for n, name in enumerate(PAPER) if n) / 6
    assert means["recall"] == sum(7.0**n for n in range(7, 13)) / 6
    assert lm_eval.averages({name: scores[name] for name in PAPER[:-1]}) == ({}, {})
    unknown = TaskScores(metrics={"acc": None, "acc_norm": None})
    assert lm_eval.averages({**{name: scores[name] for name in PAPER}, "piqa": unknown}) == ({}, {})
    assert (record.averages, record.stderr) == lm_eval.averages(record.tasks)
    parts = [record.tasks[name].stderr[metric] for name, metric in lm_eval.AVERAGES["zero_shot"].items()]
    assert record.stderr["zero_shot"] == pytest.approx(math.sqrt(sum(part**2 for part in parts)) / len(parts))


def test_a_run_is_recorded_silent_repeatable_and_limited(runtime, data, record, capfd, caplog):
    assert schema.from_json(LmEval, json.loads(json.dumps(schema.to_json(record), allow_nan=False))) == record
    assert list(record.tasks) == [*PAPER, *RECALL]
    assert record.tasks["piqa"].data.path == str(data / "piqa.jsonl")
    assert (record.seed, record.limit) == (0, None)
    questions = record.tasks["arc_easy"]
    assert (questions.samples, questions.higher_is_better) == (6, {"acc": True, "acc_norm": True})
    assert 0 < questions.metrics["acc"] < 1
    listener = Listener()
    again = run_tasks(runtime, ["piqa", "recall_swde", "hellaswag"], data=data, reporter=listener)
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []
    assert len(listener.lines) == 1
    assert again.tasks == {name: record.tasks[name] for name in ("piqa", "recall_swde", "hellaswag")}
    assert run_tasks(runtime, ["piqa"], data=data, limit=2).tasks["piqa"].samples == 2


def test_the_runtime_is_left_as_it_was(runtime, data):
    bare = tiny.tokenizer()
    bare.pad_token = None
    before = {name: tensor.clone() for name, tensor in runtime.model.state_dict().items()}
    run_tasks(dataclasses.replace(runtime, tokenizer=bare), ["recall_fda"], data=data)
    assert bare.pad_token is None
    after = runtime.model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_a_changed_file_is_read_anew_even_with_the_old_date(runtime, tmp_path):
    path = write(tmp_path / "lambada_openai.jsonl", DOCUMENTS["lambada_openai"])
    date = path.stat().st_mtime_ns
    first = run_tasks(runtime, ["lambada_openai"], data=tmp_path).tasks["lambada_openai"]
    write(path, DOCUMENTS["lambada_openai"][:1])
    os.utime(path, ns=(date, date))
    second = run_tasks(runtime, ["lambada_openai"], data=tmp_path).tasks["lambada_openai"]
    assert (first.samples, second.samples) == (2, 1)
    assert first.data.digest != second.data.digest


def test_parquet_and_a_folder_of_splits_are_the_same_documents(runtime, record, tmp_path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(DOCUMENTS["piqa"]), tmp_path / "piqa.parquet")
    write(tmp_path / "arc_easy" / "test.jsonl", DOCUMENTS["arc_easy"])
    write(tmp_path / "arc_easy" / "train.jsonl", DOCUMENTS["arc_easy"][:1])
    tasks = run_tasks(runtime, ["piqa", "arc_easy"], data=tmp_path).tasks
    for name in ("piqa", "arc_easy"):
        assert tasks[name].metrics == record.tasks[name].metrics
    (source,) = task_sources.find_sources(TaskOptions(tasks=("arc_easy",), task_data=tmp_path))
    expected = {"test": "test.jsonl", "train": "train.jsonl", "validation": "test.jsonl"}
    assert {split: path.name for split, path in source.files.items()} == expected


@pytest.mark.parametrize(("prompt", "document", "expected"), PROMPTS)
def test_the_question_comes_last_and_once(prompt, document, expected):
    assert "".join(prompt(document)) == expected


def test_any_answer_in_any_case_counts_and_none_does_not():
    assert prompts.contains("It was ADA (1843).", ["nobody", "ada (1843)"]) == 1
    assert prompts.contains("It was Ada.", ["A.a", ""]) == 0
    assert prompts.contains("It was Ada.", []) == 0


def test_names_are_suites_tasks_and_lists_of_both():
    assert resolve_tasks("paper") == PAPER
    assert resolve_tasks(["recall", "piqa, recall_nq"]) == (*RECALL, "piqa")
    assert resolve_tasks("boolq") == ("boolq",)


@pytest.mark.parametrize(("names", "message"), UNKNOWN_TASKS)
def test_an_unknown_task_is_refused_with_the_nearest_names(names, message):
    with pytest.raises(DataError) as error:
        resolve_tasks(names)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


RECALL_ROWS = '{"text": "a b", "value": "a"}\n{"text": "a b", "value": "a b"}\n{"text": null, "value": "a b"}'
BAD_DATA = {
    "missing": ("piqa", {}, "looked for piqa.jsonl, piqa.parquet, piqa/validation.jsonl, piqa/validation.parquet"),
    "empty": ("piqa", {"piqa.jsonl": ""}, "piqa.jsonl is empty"),
    "not json": ("piqa", {"piqa.jsonl": "{goal"}, "cannot use"),
    "no field": ("arc_easy", {"arc_easy.jsonl": '{"text": "a"}'}, "'question' is undefined"),
    "a later row": ("winogrande", {"winogrande.jsonl": None}, "document 2: KeyError: 'first'"),
    "examples": ("gsm8k", {"gsm8k.jsonl": '{"question": "1", "answer": "1"}'}, "give gsm8k/train.jsonl next to"),
    "all left out": ("recall_squad", {"recall_squad.jsonl": '{"text": "a", "value": "v"}'}, "no document has value"),
    "no answer": ("recall_nq", {"recall_nq.jsonl": '{"context": "a", "question": "b"}'}, "answers"),
    "after one left out": ("recall_squad", {"recall_squad.jsonl": RECALL_ROWS}, "document 3: AttributeError"),
    "python": ("fda", {}, "task fda loads its dataset in Python"),
}


@pytest.mark.parametrize("case", sorted(BAD_DATA))
def test_bad_task_data_gets_one_line(case, runtime, tmp_path):
    name, files, message = BAD_DATA[case]
    for file, content in files.items():
        (tmp_path / file).write_text(content or "")
        if content is None:
            write(tmp_path / file, [DOCUMENTS[name][0], {**DOCUMENTS[name][0], "answer": "first"}])
    with pytest.raises(DataError) as error:
        run_tasks(runtime, [name], data=tmp_path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_other_bad_options_get_one_line(runtime, tmp_path, monkeypatch):
    with pytest.raises(DataError, match="no folder"):
        run_tasks(runtime, ["piqa"], data=tmp_path / "nowhere")
    monkeypatch.setattr("slimstate.system.hub.is_reachable", lambda: False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(DataError, match=r"task piqa: the hub .* for its dataset baber/piqa; give .*`task_data`"):
        run_tasks(runtime, ["piqa"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SlimstateError, match=r"pip install 'slimstate\[eval\]'"):
        resolve_tasks("paper")


@torch.inference_mode()
def log_likelihood(runtime: Runtime, before: str, after: str) -> float:
    ids, count = tokens(runtime, before) + tokens(runtime, after), len(tokens(runtime, after))
    scores = runtime.model(input_ids=torch.tensor([ids[:-1]])).logits[0, -count:].double().log_softmax(-1)
    return float(scores.gather(1, torch.tensor(ids[-count:])[:, None]).sum())


def test_a_task_of_my_own_is_a_yaml_file_with_local_data_and_needs_no_hub(runtime, tmp_path, monkeypatch):
    monkeypatch.setattr("slimstate.system.hub.is_reachable", lambda: False)
    data = write(tmp_path / "questions.json", DOCUMENTS["arc_easy"])
    text = f"""
task: mine
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices.label.index(answerKey)}}}}"
doc_to_choice: "{{{{choices.text}}}}"
metric_list: [{{metric: acc}}]
"""
    (folder := tmp_path / "tasks").mkdir()
    (path := folder / "mine.yaml").write_text(text)
    first, second = (
        lm_eval.run_tasks(runtime, TaskOptions(tasks=(name,), include_path=place)).tasks["mine"]
        for name, place in ((str(path), None), ("mine", folder))
    )
    assert first == second
    assert (first.samples, first.data.digest[:7]) == (6, "sha256:")
    right = 0
    for row in DOCUMENTS["arc_easy"]:
        scores = [log_likelihood(runtime, row["question"], f" {choice}") for choice in row["choices"]["text"]]
        right += row["choices"]["label"][scores.index(max(scores))] == row["answerKey"]
    assert first.metrics["acc"] == pytest.approx(right / 6)
    path.write_text(text.replace("acc}", "acc_norm}"))
    (changed,) = task_sources.find_sources(TaskOptions(tasks=(str(path),)))
    assert changed.data.digest != first.data.digest  # another task, which does not continue a sweep
    (tmp_path / "empty.yaml").write_text("dataset_path: json\n")
    for name, message in (("none.yaml", "no file"), ("empty.yaml", "must have a line `task: NAME`")):
        with pytest.raises(DataError, match=message):
            resolve_tasks(str(tmp_path / name))
    with pytest.raises(DataError, match="no folder"):
        resolve_tasks("mine", tmp_path / "none")
