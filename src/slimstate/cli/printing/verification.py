"""Print what `verify` returns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slimstate.cli.terminal import printer

if TYPE_CHECKING:
    from slimstate.records.verification import VerificationRecord

EXIT_CODES = {"agrees": 0, "differs": 1, "refuses": 2}


def exit_code(record: VerificationRecord) -> int:
    return EXIT_CODES[record.outcome.verdict]


def show_verification(record: VerificationRecord) -> None:
    """Print the verdict, and what the difference is measured in."""
    console = printer()
    console.print(record.verdict)
    console.print(f"the difference is the {record.measure}; tolerance {record.tolerance:g}, {record.dtype}")
    if "out" in record.config:
        console.print(f"written to {record.config['out']}")
