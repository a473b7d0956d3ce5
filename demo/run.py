"""Everything on the bundled model: sweep, cut, look into the states, measure, reconstruct, recover, write a report."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

import slimstate
from slimstate.cli.printing.evaluation import show_sweep

HERE = Path(__file__).parent
MODEL, CALIBRATION, EVALUATION = HERE / "model", HERE / "calibration.txt", HERE / "evaluation.txt"
OUT = HERE.parent / "build" / "demo"
TOKENS = 8192
console = Console(highlight=False, soft_wrap=True)
began = [time.perf_counter()]


def step(line: str) -> None:
    """The next step, after how long the one before it took."""
    took = time.perf_counter() - began[-1]
    began.append(time.perf_counter())
    if len(began) > 2:
        console.print(f"  [dim]({took:.0f} s)[/dim]")
    console.print(f"\n[bold]{line}[/bold]")


def main() -> None:
    shutil.rmtree(OUT, ignore_errors=True)
    about = slimstate.inspect(MODEL)
    console.print(
        f"The bundled model: {about.model_type}, {about.parameters:,} parameters, {about.mixers} layers of "
        f"{about.heads} heads, key dim {about.key_dim}. All of this takes about three minutes on two CPU cores."
    )
    step("1. What would each cut cost? One calibration, three methods at 25 %, 50 % and 75 %, by masking.")
    record = slimstate.sweep(
        MODEL,
        OUT / "sweep",
        text=EVALUATION,
        data=CALIBRATION,
        samples=32,
        length=512,
        methods=("drrqr", "l1", "random"),
        compressions=(0.25, 0.5, 0.75),
        max_tokens=TOKENS,
    )
    show_sweep(record)
    step("2. Cut it, from the evidence of the sweep.")
    cuts = {compression: OUT / f"drrqr-{100 * compression:g}" for compression in (0.5, 0.75)}
    for compression, folder in cuts.items():
        evidence = OUT / "sweep" / "evidence.safetensors"
        slimstate.prune(MODEL, folder, compression=compression, evidence=evidence, progress=False)
        console.print(f"  {folder}")
    step("3. How much of the state is used, before and after?")
    looked = slimstate.analyze([MODEL, *cuts.values()], EVALUATION, OUT / "states")
    for use in looked.models:
        console.print(f"  {use.name}: key dim {use.key_dim}, rank utilisation {use.utilisation:.3f}")
    step("4. What is lost? Perplexity, and recall of names in real text, the weak spot of a small state.")
    for compression, folder in cuts.items():
        measured = slimstate.evaluate(
            folder,
            EVALUATION,
            associative=True,
            baseline=MODEL,
            max_tokens=TOKENS,
            out=OUT / f"evaluation-{100 * compression:g}.json",
        )
        before = measured.baseline
        kept = measured.associative_recall.mean, before.associative_recall.mean
        perplexity = f"perplexity per word {before.word_perplexity:.1f} to {measured.word_perplexity:.1f}"
        console.print(f"  {compression:.0%} cut: {perplexity}, names recalled {kept[1]:.0%} to {kept[0]:.0%}")
    step("5. Reconstruct the deep cut: each cut layer learns to give what it gave before, on calibration text alone.")
    reconstructed = slimstate.reconstruct(
        cuts[0.75],
        OUT / "drrqr-75-reconstructed",
        data=CALIBRATION,
        teacher=MODEL,
        steps=30,
        batch=4,
        samples=48,
        length=256,
    )
    errors = reconstructed.error_before, reconstructed.error_after
    console.print(f"  error of the layers on text held out: {errors[0]:.3f} to {errors[1]:.3f} of what they add")
    step("6. Recover it a little: some steps of fine-tuning, with the uncut model as its teacher.")
    recovered = slimstate.recover(
        OUT / "drrqr-75-reconstructed", OUT / "drrqr-75-recovered", teacher=MODEL,
        data=CALIBRATION, eval_text=EVALUATION, eval_tokens=TOKENS // 2,
        steps=10, batch_size=8, length=256, lr=3e-3, min_lr=3e-4,
        lora_targets="all-linear", lora_rank=64, lora_alpha=64,
    )  # fmt: skip
    perplexity, gap = recovered.measured.word_perplexity, recovered.measured.closed["uncut"]
    change = (
        f"perplexity per word {perplexity['before']:.1f} to {perplexity['after']:.1f}, uncut {perplexity['uncut']:.1f}"
    )
    console.print(f"  {recovered.tokens:,} tokens: {change} (windows of {recovered.settings.length} tokens)")
    console.print(f"  {gap:.0%} of what the reconstruction left of the gap in nats is closed")
    step("7. The stock class loads the cut model in a fresh process and writes with it.")
    subprocess.run([sys.executable, HERE / "generate.py", cuts[0.5], "The city was founded in"], check=True)
    step("8. One page of it all.")
    report = slimstate.report(OUT, progress=False)
    console.print(f"  {report.out}", markup=False)
    step("Recommended: the smallest state that costs at most 0.1 nats per token.")
    console.print(f"  {record.recommended.reason}\n  {record.recommended.command}", markup=False)
    console.print(f"\n{time.perf_counter() - began[0]:.0f} seconds in all. The report: {report.out}", markup=False)


main()
