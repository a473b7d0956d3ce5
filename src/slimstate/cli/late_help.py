"""Words of help texts that are looked up when the help is shown: the modules that know them load torch, for seconds."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand


class LateHelp(TyperCommand):
    """A command with `{methods}` and other words in braces in the help of its options."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        self.fill()
        super().format_options(ctx, formatter)

    def fill(self) -> None:
        """Put the words into the help texts; those without a name in braces stay as they are."""
        from slimstate.evaluation.sweep_grid import COMPRESSIONS
        from slimstate.selectors import METHODS, channel_methods

        words = {
            "methods": "; ".join(f"{selector.name}: {selector.summary}" for selector in METHODS.values()),
            "channel_methods": ",".join(channel_methods()),
            "compressions": ",".join(map(str, COMPRESSIONS)),
        }
        for option in self.params:
            for name, text in words.items():
                if getattr(option, "help", None):
                    option.help = option.help.replace(f"{{{name}}}", text)  # type: ignore[attr-defined]
