"""Cut the bundled model with every method, measure what each cut costs, and reload one cut in a fresh process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

import slimstate
from slimstate.cli.terminal import TerminalReporter
from slimstate.selectors import SELECTORS

HERE = Path(__file__).parent
MODEL, CALIBRATION, EVALUATION = HERE / "model", HERE / "calibration.txt", HERE / "evaluation.txt"
OUT = HERE.parent / "build" / "demo"
EVIDENCE = OUT / "evidence.safetensors"
KEY_DIMS = (64, 32)
console = Console(highlight=False)


def perplexity(folder: Path) -> float:
    return float(slimstate.evaluate(folder, EVALUATION, max_tokens=16384)["perplexity"])


def cut(method: str, key_dim: int) -> Path:
    """Every method from one calibration; grad goes first and its evidence serves the others."""
    out = OUT / f"{method}-{key_dim}"
    slimstate.prune(
        MODEL,
        out,
        method=method,
        key_dim=key_dim,
        data=str(CALIBRATION),
        samples=64,
        length=512,
        evidence=EVIDENCE,
        force=True,
        reporter=TerminalReporter() if method == "grad" else slimstate.Reporter(),
    )
    return out


def main() -> None:
    EVIDENCE.unlink(missing_ok=True)
    about = slimstate.inspect(MODEL)
    console.print(
        f"The bundled model: {about['model_type']}, {about['parameters']:,} parameters, {about['mixers']} layers of "
        f"{about['heads']} heads, key dim {about['key_dim']}. Cutting it takes about two minutes on two CPU cores."
    )
    uncut = perplexity(MODEL)
    table = Table(
        "method", *(f"key dim {key_dim}" for key_dim in KEY_DIMS), title="perplexity after the cut, no retraining"
    )
    table.add_row("uncut", *(f"{uncut:.1f}" for _ in KEY_DIMS))
    found = {}
    for method in ("grad", *(name for name in SELECTORS if name != "grad")):
        found[method] = [perplexity(cut(method, key_dim)) for key_dim in KEY_DIMS]
        console.print(f"  {method}: {', '.join(f'{value:.1f}' for value in found[method])}")
    for method in SELECTORS:
        table.add_row(method, *(f"{value:.1f}  (+{value - uncut:.1f})" for value in found[method]))
    console.print(table)
    kept = OUT / f"drrqr-{KEY_DIMS[0]}"
    console.print(f"The cut checkpoint is {kept}. In a fresh process the stock class writes with it:")
    subprocess.run([sys.executable, HERE / "generate.py", kept, "The city was founded in"], check=True)


main()
