"""Build the commands from the workflows: the first input is the argument, everything else is a flag.

The docstring of a workflow is the help of its command, and its parameters before `config` are the inputs. Every option
of the config is a flag; so is every option of `flags`, which only the command has.
"""

import ast
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

import slimstate
from slimstate.cli.declarations import declaration, function_of
from slimstate.cli.terminal import Detail, Printout, print_all, print_json
from slimstate.system.distributed import from_main
from slimstate.system.errors import PlanError, quoted
from slimstate.system.options import Option, Options, once, options_of
from slimstate.system.value import Value

NOT_INPUTS = ("config", "tokenizer", "progress", "score")
SHORT_FLAGS = {"quiet": ["-q"], "verbose": ["-v"]}
CLICK_TYPES = {int: click.INT, float: click.FLOAT, bool: click.BOOL}


class OutputFlags(Options):
    """Output"""

    json: bool = once()
    """Print one JSON record instead of a table."""
    quiet: bool = once()
    """Show no progress and no notes."""
    verbose: bool = once()
    """Show diagnostics, too."""

    def check(self) -> None:
        if self.quiet and self.verbose:
            raise PlanError("give either `quiet` or `verbose`")


class HubFlags(OutputFlags):
    """Output"""

    push_to_hub: str | None = once(None)
    """Upload the result to this repository of the hub, which is created as a private one where it does not exist."""


class Command(Value):
    """A command: its config, and the lines and tables that it prints, by default the headline.

    `run` replaces the call of the workflow where flags of the command change it, and decides whether it needs `out`.
    `metavar` is what the help calls the argument, where that is not the name of the parameter.
    """

    name: str
    config: type[Options] = Options
    show: Callable[[Any], Printout] = lambda result: [result.headline()]
    flags: type[OutputFlags] = OutputFlags
    run: Callable[..., Any] | None = None
    exit_code: Callable[[Any], int] | None = None
    metavar: str | None = None

    @cached_property
    def declaration(self) -> ast.FunctionDef:
        return declaration(self.name)

    @cached_property
    def parameters(self) -> dict[str, bool]:
        """The parameters of the workflow by name, and whether each is required."""
        arguments = self.declaration.args
        names = [argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)]
        required = names[: len(arguments.args) - len(arguments.defaults)]
        return {name: name in required and not (name == "out" and self.run is not None) for name in names}

    @property
    def inputs(self) -> dict[str, bool]:
        """The parameters that a command line can have."""
        return {name: required for name, required in self.parameters.items() if name not in NOT_INPUTS}

    @property
    def argument(self) -> str | None:
        """The input that has no flag: the first one, where it is required."""
        return next((name for name, required in self.inputs.items() if required), None)

    @property
    def help(self) -> str:
        return re.split(r"\n\s*(?:Parameters|Returns|Examples):\n", ast.get_docstring(self.declaration) or "")[0]

    def input_help(self, name: str) -> str:
        """Return the first sentence that the docstring of the workflow says of a parameter."""
        text = ast.get_docstring(self.declaration) or ""
        match = re.search(rf"^    {name}: (.*(?:\n {{8,}}.*)*)", text, re.MULTILINE)
        return "" if match is None else re.split(r"(?<=\.) ", " ".join(match[1].split()))[0]

    def parse(self, values: Mapping[str, Any]) -> tuple[dict[str, Any], Options, OutputFlags]:
        """Return the inputs, the config and the flags that values by flat name describe; refuse unknown names."""
        inputs = {name: value for name, value in values.items() if name in self.inputs}
        for name, is_required in self.inputs.items():
            if is_required and name not in inputs:
                raise PlanError(f"{self.name} needs `{name}`")
        for name, value in inputs.items():
            texts = value if name == "models" else [value]
            if not (isinstance(texts, (list, tuple)) and all(isinstance(text, str | None) for text in texts)):
                raise PlanError(f"`{name}` of {self.name} must be text, got {quoted(repr(value))}")
            if "" in texts:  # as of a variable of the shell that is not set; as a path it would be this folder
                raise PlanError(f"`{name}` must not be empty")
        flags = {option.name for option in options_of(self.flags)} & values.keys()
        others = {name: value for name, value in values.items() if name not in {"command", *inputs, *flags}}
        return inputs, self.config.from_values(others), self.flags.from_values({name: values[name] for name in flags})

    def execute(self, values: Mapping[str, Any]) -> int:
        """Run the workflow with values by flat name, print its result, and return the exit code."""
        from slimstate.cli import name_flags
        from slimstate.system import hub
        from slimstate.system.console import TerminalReporter

        inputs, config, flags = self.parse(values)
        reporter = TerminalReporter(-1 if flags.quiet else int(flags.verbose), name_flags)
        if (repository := getattr(flags, "push_to_hub", None)) is not None:  # fails before the work, not after it
            from_main(lambda: hub.check_repository(repository))
        if self.run is not None:
            result = self.run(config=config, flags=flags, reporter=reporter, **inputs)
        else:
            more = {"config": config, "progress": reporter}
            inputs |= {name: value for name, value in more.items() if name in self.parameters}
            result = getattr(slimstate, function_of(self.name))(**inputs)
        out = result.out if hasattr(result, "out") else getattr(result, "config", {}).get("out")
        if flags.json:
            print_json(result.to_json())
        else:
            parts = [part for part in self.show(result) if flags.verbose or not isinstance(part, Detail)]
            print_all([*parts, *([] if out is None else [f"written to {out}"])])
        if repository is not None and out is not None:
            with reporter.waiting(f"uploading to {repository}"):
                address = from_main(lambda: hub.push(Path(out), repository))
            reporter.say(f"uploaded to {address}")
        return 0 if self.exit_code is None else self.exit_code(result)


class WorkflowCommand(click.Command):
    """A click command whose options are listed by group, with words in braces filled in when the help is shown."""

    def __init__(self, command: Command) -> None:
        self.command, about = command, command.help
        flags = [
            ("Options", click.Option([flag_of(name)], required=required, help=command.input_help(name), type=str))
            for name, required in command.inputs.items()
            if name != command.argument
        ]
        flags += [(option.section, click_option(option)) for option in options_of(command.config)]
        flags += [("Output", click_option(option)) for option in options_of(command.flags)]
        self.sections = {title: [flag for section, flag in flags if section == title] for title, _ in flags}
        params: list[click.Parameter] = [flag for _, flag in flags]
        if (name := command.argument) is not None:
            count, metavar = -1 if name == "models" else 1, command.metavar
            params.insert(0, click.Argument([name], nargs=count, required=command.inputs[name], metavar=metavar))
            about += f"\n\n{metavar or name.upper()}: {command.input_help(name)}"
        names = ["-h", "--help"]
        super().__init__(command.name, params=params, help=about, context_settings={"help_option_names": names})

    def invoke(self, ctx: click.Context) -> int:
        """Call the command with the values on the command line, without defaults."""
        is_default = {name: ctx.get_parameter_source(name) is ParameterSource.DEFAULT for name in ctx.params}
        return self.command.execute({name: value for name, value in ctx.params.items() if not is_default[name]})

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, params in self.sections.items():
            records = [record for param in params if (record := param.get_help_record(ctx)) is not None]
            with formatter.section(title):
                formatter.write_dl([(flag, fill_words(text)) for flag, text in records])


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def click_option(option: Option) -> click.Option:
    """Return an option as a flag; its type is checked by its config, numbers by click."""
    help_text = option.help
    if option.default not in (None, False, "", ()) and "default" not in help_text:
        default = ",".join(map(str, option.default)) if isinstance(option.default, tuple) else option.default
        help_text = f"{help_text} [default: {default}]"
    names = [flag_of(option.name), *SHORT_FLAGS.get(option.name, ())]
    if option.type is bool:
        return click.Option(names, is_flag=True, help=help_text)
    return click.Option(names, type=CLICK_TYPES.get(option.type, click.STRING), help=help_text)


def fill_words(text: str) -> str:
    """Return a help text with names of options as flags, and with the names of methods, which import torch."""
    text = re.sub(r"`(\w+)`", lambda match: flag_of(match[1]), text)
    if "{" not in text:
        return text
    from slimstate.selectors import METHODS, channel_methods

    words = {
        "{methods}": "; ".join(f"{selector.name}: {selector.summary}" for selector in METHODS.values()),
        "{channel_methods}": ",".join(channel_methods()),
    }
    return re.sub(r"\{\w+\}", lambda match: words.get(match[0], match[0]), text)
