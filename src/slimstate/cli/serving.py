"""The verb that asks an engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from slimstate.cli.terminal import Device, Documents, Json, Text, print_json, printer
from slimstate.system.console import TerminalReporter
from slimstate.system.errors import PlanError

EXIT_CODES = {"agrees": 0, "differs": 1, "refuses": 2}


def verify(
    model: Annotated[str, typer.Argument(metavar="DIR", help="A model folder or a hub id.")],
    engine: Annotated[str, typer.Option(help="transformers, mlx, llama.cpp, vllm or sglang.")],
    against: Annotated[
        str | None, typer.Option(help="The uncut model: an engine that is wrong by itself is told from a cut that is.")
    ] = None,
    python: Annotated[
        Path | None, typer.Option(help="The interpreter of the environment that has the engine; by default this one.")
    ] = None,
    converter: Annotated[
        Path | None,
        typer.Option(help="For llama.cpp: its convert_hf_to_gguf.py, which makes a GGUF file of the folder first."),
    ] = None,
    engine_settings: Annotated[
        str | None,
        typer.Option(help="JSON for the engine itself, such as '{\"gpu_memory_utilization\": 0.5}' for vllm."),
    ] = None,
    data: Annotated[str | None, typer.Option(help=Text.format("read") + " By default a short one of ours.")] = None,
    documents: Documents = None,
    samples: Annotated[int, typer.Option(help="Windows of the text.")] = 4,
    length: Annotated[int, typer.Option(help="Tokens per window; the first half is the prompt of the decoding.")] = 64,
    tokens: Annotated[int, typer.Option(help="Tokens to decode after each prompt.")] = 16,
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="Largest difference that agrees, in standard deviations of the logits; by default 1e-3 in float32,"
            " 0.1 in bfloat16, 0.05 in float16."
        ),
    ] = None,
    device: Device = None,
    dtype: Annotated[str, typer.Option(help="What both compute in: float32, bfloat16 or float16.")] = "float32",
    out: Annotated[Path | None, typer.Option(help="File for the record, such as records/mlx.json.")] = None,
    as_json: Json = False,
) -> None:
    """Load a model in an engine, in a process of its own, and compare its log-probabilities with transformers'.

    Exit code 0: they agree. 1: they differ. 2: the engine refuses the model, or is not there.
    """
    from slimstate.models.options import RunOptions
    from slimstate.serving.verification.engine_call import EngineOptions
    from slimstate.serving.verification.verify import VerifyOptions
    from slimstate.serving.verification.verify import verify as compare

    record = compare(
        model,
        EngineOptions(engine=engine, python=python, converter=converter, settings=_settings(engine_settings)),
        against=against,
        options=VerifyOptions(
            data=data, documents=documents, samples=samples, length=length, tokens=tokens, tolerance=tolerance
        ),
        run=RunOptions(device=device, dtype=dtype),
        out=out,
        reporter=TerminalReporter(),
    )
    if as_json:
        print_json(record.to_json())
    else:
        console = printer()
        console.print(record.verdict, markup=False)
        console.print(f"the difference is the {record.measure}; tolerance {record.tolerance:g}, {record.dtype}")
        if out is not None:
            console.print(f"written to {out}", markup=False)
    raise typer.Exit(EXIT_CODES[record.outcome.verdict])


def _settings(text: str | None) -> dict[str, object]:
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except ValueError as error:
        raise PlanError(f"--engine-settings is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise PlanError("--engine-settings is not an object of names and values")
    return found
