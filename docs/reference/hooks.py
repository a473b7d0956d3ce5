"""Write the reference of the command from the command itself while the site is built."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

MARK = "<!-- every command -->"


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    return markdown.replace(MARK, reference()) if MARK in markdown else markdown


def reference() -> str:
    """Return a section for every command, with its usage and options."""
    from slimstate.cli.app import app

    return "\n\n".join(_sections("slimstate", app()))


def _sections(name: str, command: click.Command) -> Iterator[str]:
    from slimstate.cli.commands import fill_words

    context = click.Context(command, info_name=name)
    if isinstance(command, click.Group):
        for inner in command.list_commands(context):
            member = command.get_command(context, inner)
            assert member is not None
            yield from _sections(f"{name} {inner}", member)
        return
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    records = [option.get_help_record(context) for option in command.params if isinstance(option, click.Option)]
    rows = [f"| `{flag}` | {_escaped(fill_words(help))} |" for flag, help in filter(None, records)]
    table = "\n".join(["| option | meaning |", "|---|---|", *rows])
    yield f"## {name.removeprefix('slimstate ')}\n\n{(command.help or '').strip()}\n\n```\n{usage}\n```\n\n{table}"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
