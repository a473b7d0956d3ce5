import functools
import gc
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the oracles here are float32 on the CPU

import pytest
import torch

import command
import launching
import tiny

torch.set_num_threads(1)
torch.backends.mkldnn.set_flags(False)  # oneDNN takes ten times as long for the small products of these models
# the slowest files, slowest first: started last, one of them would keep one process busy while the other waits
LONGEST = (
    "contract", "adaptation", "reconstruct", "recovery_training", "recipes", "fla_kernels", "report", "lm_eval",
    "formats", "processes", "resume", "hybrids", "sweep", "chunked_forms", "options", "recover_options", "control",
    "python_api", "measuring", "recovered_checkpoint", "distributed", "verification", "benchmark", "checkpoint",
    "pretrain", "sweep_tasks", "documents", "fla_modules", "rotations", "cli", "distill", "guides", "one_layer",
    "distillation", "one_layer_in_memory", "calibration", "shared_filters", "structure", "front_page", "teacher",
    "budget", "wikitext", "offload", "units", "strange_models", "effective_rank",
)  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # all processes of a run share the Pythons that programs are forked from
        launching.start_warm()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
    places = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONGEST)))


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of a tiny model of each variant, in two or more shards, built when it is first used."""

    class Folders(dict[str, Path]):
        def __missing__(self, name: str) -> Path:
            self[name] = tiny.save(tiny.build(tiny.VARIANTS[name]), root / name, "100KB")
            return self[name]

    root = tmp_path_factory.mktemp("models")
    return Folders()


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(tiny.text(14_000))
    return path


@pytest.fixture
def execute(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """Run the command in this process; return its exit code, standard output and standard error."""
    return functools.partial(command.run, capsys, monkeypatch)


@pytest.fixture
def succeed(execute: Callable[..., tuple[int, str, str]]) -> Callable[..., str]:
    """Run the command in this process, which must succeed; return its standard output."""

    def run(*words: object) -> str:
        code, out, err = execute(*words)
        assert code == 0, err
        return out

    return run


@pytest.fixture
def refusal(execute: Callable[..., tuple[int, str, str]]) -> Callable[..., str]:
    """Run the command in this process, which must refuse its input; return its one line about it."""

    def run(*words: object) -> str:
        code, out, err = execute(*words)
        *notes, line = err.splitlines()
        assert (code, out, any(note.startswith("slimstate: ") for note in notes)) == (2, "", False), err
        return line.removeprefix("slimstate: ")

    return run


@pytest.fixture
def unrendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw figures but leave their files empty: rendering takes seconds, and few tests look at the files."""
    figures = pytest.importorskip("matplotlib.figure")
    render = figures.Figure.savefig

    def save(figure: object, target: Path, *, format: str, **settings: object) -> None:
        render(figure, target, format=format, **settings) if format == "svg" else target.write_bytes(b"")

    monkeypatch.setattr(figures.Figure, "savefig", save)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="pages are opened with playwright")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium on this machine to open a page in")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module", autouse=True)
def _freeze_libraries() -> None:
    """Libraries hold millions of objects to the end: garbage collections, which training runs often, skip them."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # so that a count of objects at the end is right
