"""The command line: arguments in, exit code out. 0 clean, 1 findings, 2 something could not be done."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

import click

from graphlint import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CLEAN, FAILED = 0, 2

# name -> (where the click command lives, its line in the help text); loaded only when used, so that linting loads no
# torch
_COMMANDS = {
    "check": ("graphlint.commands.check:check", "Lint files and folders (what `graphlint PATHS` does)."),
    "rules": ("graphlint.commands.book:rules", "List the rules."),
    "explain": ("graphlint.commands.book:explain", "Show the page of one rule."),
    "regions": ("graphlint.commands.regions:regions", "List every capture region."),
    "dry-run": (
        "graphlint.runtime.cli_dryrun:dry_run_command",
        "Run a step without a GPU and report what would break its capture.",
    ),
    "profile": (
        "graphlint.runtime.cli_profile:profile_command",
        "Is a graph worth it? The launch-bound share of a step.",
    ),
    "parity": ("graphlint.runtime.cli_profile:parity_command", "Run eager and graphed side by side until they differ."),
}
_OWN = ("-h", "--help", "--version")  # options of `graphlint` itself


class Commands(click.Group):
    """Commands fetched by name; what is no command is a path to check."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Puts `check` in front unless the arguments begin with a command."""
        if not args or (args[0] not in _COMMANDS and args[0] not in _OWN):
            args = ["check", *args]
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, in the order in which people meet them."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports the module of one command."""
        if cmd_name not in _COMMANDS:
            return None
        module, name = _COMMANDS[cmd_name][0].split(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands from the table above, without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in _COMMANDS.items()])


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="graphlint")
def cli() -> None:
    """Keeps PyTorch code safe to capture in a CUDA graph.

    `graphlint [OPTIONS] [PATHS]...` lints; see `graphlint check --help` for its options.
    """


def main(args: Sequence[str] | None = None) -> None:
    """Entry point of the `graphlint` command; leaves through SystemExit, without a traceback for a user's mistake."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a file name or a source line must not end the run in an ASCII terminal
            stream.reconfigure(errors="backslashreplace")
    given = None if args is None else list(args)
    sys.exit(guarded(lambda: cli.main(args=given, prog_name="graphlint", standalone_mode=False)))


def guarded(work: Callable[[], Any]) -> int:
    """Runs a command and turns everything that may end it into an exit code and one line on stderr."""
    try:
        code = work()
        sys.stdout.flush()
        return code if isinstance(code, int) else CLEAN
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.ClickException as error:
        error.show()
        return FAILED
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        return 130
    except BrokenPipeError:  # `graphlint | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "torch" or os.environ.get("GRAPHLINT_DEBUG"):
            return _internal(error)
        click.echo("graphlint: this command runs your code: pip install 'cuda-graphlint[runtime]' for torch", err=True)
        return FAILED
    except Exception as error:
        return _internal(error)


def _internal(error: Exception) -> int:
    """Our fault, not the user's: one line that says so, and the traceback only when asked for."""
    if os.environ.get("GRAPHLINT_DEBUG"):
        raise error
    what = f"{type(error).__name__}: {error}".splitlines()[0]
    click.echo(f"graphlint: internal error: {what}; please report it (GRAPHLINT_DEBUG=1 shows where)", err=True)
    return FAILED
