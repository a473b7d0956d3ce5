"""The commands of the guides run on tiny models, those of an engine where `make engines` installs it."""

import json
import os
import re
import shlex
import shutil
import subprocess
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import engine_models
import pytest

import tiny
from launching import free_port
from places import ROOT
from slimstate.serving.verification.engine_call import convert_to_gguf

pytestmark = pytest.mark.slow
BLOCK = re.compile(r"<!-- run(?:: (\w+))? -->\n```(?:python)?\n(.*?)```", re.DOTALL)
MODELS = {"": "qwen3_next", "mlx": "qwen3_next", "llama": "mamba2", "vllm": "falcon_h1", "compressed": "falcon_h1"}
SMALL = {
    "sweep": "--samples 8 --length 64 --text-length 64 --max-tokens 256",
    "prune": "--reconstruct-steps 2 --reconstruct-samples 8 --reconstruct-length 64",
    "eval": "--length 128 --max-tokens 256",
    "verify": "--samples 2 --length 32 --tokens 4 --device cpu",
}
CONVERTER = "convert_hf_to_gguf.py"
SHARED_MEMORY = ("--engine-settings", '{"gpu_memory_utilization": 0.2}')


def place(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put an engine where the guides have it, in the current folder, or skip the test."""
    python, _ = engine_models.interpreter(engine)
    if engine == "compressed":
        pytest.importorskip("llmcompressor", reason="make engines-compressed installs it")
    elif engine and not python:
        pytest.skip(f"make engines-{engine} installs it")
    elif engine:
        Path(f"{engine}-env").symlink_to(Path(python).parents[1])
        Path("llama.cpp").symlink_to(Path(os.environ.get("SLIMSTATE_LLAMA_CONVERTER", "")).parent)
        monkeypatch.setenv("PATH", f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}")


def answers(model: str, *command: str) -> bool:
    """Start a server of a model on this machine, and return whether it completes a prompt."""
    port = free_port()
    request = {"prompt": "a state", "max_tokens": 2, "model": model}
    process = subprocess.Popen([*command, "--host", "127.0.0.1", "--port", port])
    end = time.monotonic() + 400  # vLLM compiles for minutes
    try:
        while time.monotonic() < end and process.poll() is None:
            try:
                url = f"http://127.0.0.1:{port}/v1/completions"
                data = Request(url, json.dumps(request).encode(), {"Content-Type": "application/json"})
                return json.load(urlopen(data, timeout=60))["usage"]["completion_tokens"] > 0
            except (ConnectionError, URLError):
                time.sleep(1)
        return False
    finally:
        process.terminate()  # vLLM then ends its own processes
        process.wait(60)


@pytest.mark.parametrize(("guide", "engine"), [("key-dim", ""), *(("engine", engine) for engine in MODELS)])
def test_commands_of_a_guide_run(guide, engine, tmp_path, monkeypatch, succeed, unrendered):
    monkeypatch.chdir(tmp_path)
    place(engine, monkeypatch)
    monkeypatch.setenv("MODEL", str(engine_models.uncut(MODELS[engine], Path("model"))))
    for seed, name in enumerate(("TEXT", "TEST")):
        Path(f"{name}.txt").write_text(tiny.text(14_000, seed))
        monkeypatch.setenv(name, f"{name}.txt")
    for name, block in BLOCK.findall((ROOT / f"docs/guides/{guide}.md").read_text(encoding="utf-8")):
        if name == engine == "compressed" and block.startswith("from "):
            exec(compile(block, guide, "exec"), {})
            continue
        for line in block.replace("\\\n", "").splitlines() * (name in ("", engine)):
            program, *words = shlex.split(os.path.expandvars(line))
            if program == "slimstate":
                more = SHARED_MEMORY * (words[0] == "verify" and engine == name == "vllm")
                succeed(*words, *shlex.split(SMALL.get(words[0], "")), *more)
            elif program == "vllm":
                assert answers(words[1], program, *words, "--gpu-memory-utilization", "0.2")
            elif program.endswith("server"):
                assert answers(words[words.index("--model") + 1], program, *words)
            elif words and Path(words[0]).name == CONVERTER:
                converter, model = map(Path, words[:2])
                with convert_to_gguf(model, converter, "bfloat16") as file:  # it stops at a tiny tokenizer
                    shutil.copyfile(file, words[-1])
            else:
                subprocess.run([program, *words], check=True, capture_output=True)
