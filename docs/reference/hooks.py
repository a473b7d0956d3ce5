"""Write the reference while the site is built: commands and options as they are declared in the code."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import click

COMMANDS = "<!-- every command -->"
OPTIONS = re.compile(r"<!-- options: (\w+) -->")


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    if COMMANDS in markdown:
        from slimstate.cli.app import root_command

        markdown = markdown.replace(COMMANDS, "\n\n".join(_commands("slimstate", root_command)))
    return OPTIONS.sub(lambda mark: _options(mark[1]), markdown)


def _commands(name: str, command: click.Command) -> Iterator[str]:
    """Yield a section for every command, with its usage and options."""
    context = click.Context(command, info_name=name)
    if isinstance(command, click.Group):
        for inner in command.list_commands(context):
            member = command.get_command(context, inner)
            assert member is not None
            yield from _commands(f"{name} {inner}", member)
        return
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    records = [option.get_help_record(context) for option in command.params if isinstance(option, click.Option)]
    table = _table(("option", "meaning"), filter(None, records))
    yield f"## {name.removeprefix('slimstate ')}\n\n{(command.help or '').strip()}\n\n```\n{usage}\n```\n\n{table}"


def _options(name: str) -> str:
    """Return a table of the options of a config."""
    import slimstate
    from slimstate.system.options import options_of

    options = options_of(getattr(slimstate, name))
    rows = [(option.name, "" if option.default is None else f"`{option.default!r}`", option.help) for option in options]
    return _table((f"option of `{name}`", "default", "meaning"), rows)


def _table(titles: Iterable[str], rows: Iterable[tuple[str, ...]]) -> str:
    from slimstate.cli.commands import fill_words

    lines = [list(titles), ["---"] * len(list(titles))]
    for name, *cells in rows:
        lines.append([f"`{name}`", *(fill_words(cell).replace("|", "\\|").replace("\n", " ") for cell in cells)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
