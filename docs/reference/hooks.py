"""Writes the reference of the command from its parser, while the site is built: it cannot be out of date."""

from __future__ import annotations

from typing import Any

MARK = "<!-- every command -->"


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    return markdown.replace(MARK, reference()) if MARK in markdown else markdown


def reference() -> str:
    import typer

    from slimstate.cli import app

    root = typer.main.get_command(app)
    return "\n\n".join(section for name, verb in root.commands.items() for section in sections(name, verb))


def sections(name: str, verb: Any) -> list[str]:
    """One of a command, and one for each of its own."""
    if hasattr(verb, "commands"):
        return [part for inner, command in verb.commands.items() for part in sections(f"{name} {inner}", command)]
    if hasattr(verb, "fill"):
        verb.fill()  # with the names of methods, which are looked up late
    arguments = [given for given in verb.params if given.param_type_name == "argument"]
    options = [given for given in verb.params if given.param_type_name == "option" and given.name != "help"]
    usage = " ".join(["slimstate", name, *map(placeholder, arguments), "[OPTIONS]"])
    lines = [f"## {name}", (verb.help or "").strip(), f"```\n{usage}\n```"]
    rows = [f"| `{named(given)}` | {escaped(given.help)} | |" for given in arguments]
    rows += [f"| `{', '.join(given.opts)}` | {escaped(given.help)} | {default_of(given)} |" for given in options]
    return ["\n\n".join([*lines, "\n".join(["| option | what it does | default |", "|---|---|---|", *rows])])]


def named(argument: Any) -> str:
    return argument.metavar or argument.name.upper()


def placeholder(argument: Any) -> str:
    """An argument as a line of usage has it."""
    name = named(argument)
    return name if argument.required else f"[{name}]"


def default_of(option: Any) -> str:
    value = option.default() if callable(option.default) else option.default
    if value is None or value is False or value == () or option.required:
        return "required" if option.required else ""
    return f"`{value}`"


def escaped(text: str | None) -> str:
    return (text or "").replace("|", "\\|").replace("\n", " ")
