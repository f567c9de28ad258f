"""`graphlint dry-run`: a step or a program, judged without a GPU."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from graphlint.runtime.dryrun.report import DryRunReport

FOUND, FAILED = 1, 2


class _Failure(click.ClickException):
    """One line on stderr, exit code 2."""

    exit_code = FAILED


@click.command("dry-run")
@click.argument("target", metavar="MODULE:CALLABLE|FILE.py")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--runs", default=3, show_default=True, type=click.IntRange(1), help="Runs of a step that are compared.")
@click.option("--warmup", default=1, show_default=True, type=click.IntRange(0), help="Runs of a step before the first.")
@click.option("--target-torch", metavar="VERSION", help="Judge for this torch release.  [default: the running one]")
@click.option("--output-format", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--output-file", "-o", type=click.Path(dir_okay=False, path_type=Path), help="Write the report here.")
@click.option("--exit-zero", "-e", is_flag=True, help="Exit with 0 even when there are findings.")
def dry_run_command(
    target: str,
    arguments: tuple[str, ...],
    runs: int,
    warmup: int,
    target_torch: str | None,
    output_format: str,
    output_file: Path | None,
    exit_zero: bool,
) -> None:
    """Run a step without a GPU and report what would break its capture or its replay.

    MODULE:CALLABLE is the step, called without arguments; or a function that builds it and returns `(step, args)`,
        where `step(*args)` is what is captured. A `between(step, args, i)` in the same module is called before run i:
        refill inputs, step a scheduler. FILE.py is a whole program, run as a script with everything that it captures
        and replays; ARGUMENTS are its own.

    Exit code: 0 clean, 1 findings, 2 it could not be run.
    """
    try:
        importlib.import_module("torch")
    except ImportError:
        raise _Failure("the dry run needs torch, which is not installed; install it beside graphlint") from None
    if Path(target).is_file():
        from graphlint.runtime.dryrun.script import dry_run_script

        report = dry_run_script(target, arguments, target_torch)
    else:
        report = _step(target, runs, warmup, target_torch)
    _emit(report.to_json() if output_format == "json" else report.to_text(), output_file)
    if report.error and not report.findings:
        raise _Failure(f"the step ended early: {report.error}")
    if not report.ok and not exit_zero:
        sys.exit(FOUND)


def _step(target: str, runs: int, warmup: int, target_torch: str | None) -> DryRunReport:
    """Imports and builds under the played device, so that every tensor's place is known."""
    from graphlint.runtime.dryrun.emulate import emulated_device
    from graphlint.runtime.dryrun.run import dry_run

    with emulated_device():
        module, called = _resolve(target)
        step, args = _built(called)
        return dry_run(
            step, *args, between=getattr(module, "between", None), runs=runs, warmup=warmup, target_torch=target_torch
        )


def _resolve(target: str) -> tuple[Any, Any]:
    """`pkg.mod:name.attribute` -> the module and the callable."""
    name, _, path = target.partition(":")
    if not path:
        raise _Failure(f"`{target}` names no callable; write MODULE:CALLABLE, or the path of a file that exists")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = found = importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise _Failure(f"`{name}` can't be imported: {error}") from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise _Failure(f"`{name}` has no `{path}`; name a callable that it defines")
        found = getattr(found, part)
    if not callable(found):
        raise _Failure(f"`{target}` is no callable but a {type(found).__name__}")
    return module, found


def _built(called: Any) -> tuple[Any, tuple[Any, ...]]:
    """Calls a builder; a step that takes no arguments is called once to tell the two apart, which warms it up."""
    try:
        made = called()
    except Exception as error:
        raise _Failure(f"calling it failed: {type(error).__name__}: {error}") from error
    if isinstance(made, tuple) and len(made) == 2 and callable(made[0]) and isinstance(made[1], (tuple, list)):
        return made[0], tuple(made[1])
    return called, ()


def _emit(text: str, output_file: Path | None) -> None:
    if output_file is None:
        click.echo(text)
        return
    try:
        output_file.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise _Failure(f"{output_file}: {error.strerror or error}") from error
