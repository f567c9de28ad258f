"""`graphlint check`: lint, report, and with `--fix` mend."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click
import msgspec

from graphlint.commands.options import FORMAT, file_options, settings
from graphlint.config import Config, ConfigError
from graphlint.findings import LintResult, Problem

if TYPE_CHECKING:
    from graphlint.discover import Stdin

STDIN = "-"


@click.command()
@file_options
@click.option(
    "--select",
    multiple=True,
    metavar="RULES",
    help="Only these: codes, names, families, severities, ALL (comma separated).",
)
@click.option("--ignore", multiple=True, metavar="RULES", help="All but these.")
@click.option("--extend-select", multiple=True, metavar="RULES", help="These too, beside the configured ones.")
@click.option(
    "--per-file-ignores", multiple=True, metavar="PATTERN:RULE", help="Not these in files that fit the pattern."
)
@click.option("--fix", is_flag=True, help="Mend what can be mended without a change of meaning.")
@click.option(
    "--unsafe-fixes", is_flag=True, default=None, help="With --fix or --diff: also mend what needs a second look."
)
@click.option("--diff", is_flag=True, help="Print what --fix would change, change nothing.")
@click.option("--output-format", type=FORMAT, help="How to print findings.  [default: full]")
@click.option("-o", "--output-file", metavar="FILE", help="Write the report there instead of to standard output.")
@click.option("--statistics", is_flag=True, help="Count findings by rule instead of listing them.")
@click.option("--confirm", metavar="REPORT", help="Mark findings by the JSON report of `graphlint dry-run`.")
@click.option("-e", "--exit-zero", is_flag=True, help="Exit with 0 even when there are findings.")
@click.option("--stdin-filename", metavar="NAME", help="Lint standard input under this name.")
@click.option("-w", "--watch", is_flag=True, help="Lint again whenever a file changes.")
@click.option("--show-files", is_flag=True, help="List the files that would be linted.")
@click.option(
    "--color",
    type=click.Choice(["auto", "always", "never"]),
    default="auto",
    help="When to use colours.  [default: auto]",
)
def check(paths: tuple[str, ...], **options: Any) -> int:
    """Lint files and folders as one program; no PATHS: the current folder.

    Exit code: 0 clean (notes do not count), 1 findings, 2 something could not be done.
    """
    wanted = list(paths) or [os.curdir]
    given = _stdin(wanted, options)
    config = settings([*given] or wanted, options)
    if options["show_files"]:
        return show_files(wanted, config)
    if options["watch"]:
        return _watch(wanted, config, options)
    return once(wanted, config, options, given)


def once(paths: Sequence[str], config: Config, options: dict[str, Any], given: dict[str, bytes]) -> int:
    """One run: lint, fix, report. Answers with the exit code."""
    from graphlint.discover import Stdin

    begun = time.perf_counter()
    stdin = Stdin(*next(iter(given.items()))) if given else None
    result = lint(paths, config, options["quiet"], stdin)
    if options["confirm"]:
        result = _confirmed(result, options["confirm"])
    if options["diff"] or options["fix"]:
        return _mend(paths, result, config, options, given)
    code = report(result, config, options, given)
    if options["verbose"]:
        release = ".".join(map(str, config.target_torch))
        seconds = time.perf_counter() - begun
        click.echo(f"{seconds:.2f} s, torch {release}, settings {config.file or 'built in'}", err=True)
    return code


def _confirmed(result: LintResult, path: str) -> LintResult:
    """Notes on every finding whether a dry run saw it; the counts go to stderr. The report's reader is fetched by name:
    the halves know each other's data, not each other's code.
    """
    reader = importlib.import_module("graphlint.runtime.confirm")
    try:
        findings, counts = reader.annotate(result.findings, path)
    except reader.ConfirmError as error:
        raise click.UsageError(str(error)) from error
    click.echo(f"dry run: {counts}", err=True)
    return msgspec.structs.replace(result, findings=tuple(findings))


def lint(paths: Sequence[str], config: Config, quiet: bool, stdin: Stdin | None = None) -> LintResult:
    """Lints with progress on stderr where somebody sees it."""
    from graphlint import pipeline, progress

    seen = not quiet and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    try:
        with progress.Line(sys.stderr) if seen else contextlib.nullcontext():
            return pipeline.lint(paths, config, stdin)
    except ConfigError as error:
        raise click.UsageError(str(error)) from error


def report(result: LintResult, config: Config, options: dict[str, Any], given: dict[str, bytes]) -> int:
    """Prints findings on stdout (or into the file), everything else on stderr."""
    from graphlint import report as reports
    from graphlint.report import data, text
    from graphlint.report.view import View

    human = config.output_format in reports.HUMAN
    target = options["output_file"]
    colour = human and not target and _colour(options["color"])
    view = View(_base(config), colour, options["verbose"], given)
    if options["statistics"]:
        body = text.statistics(result, view) if human else data.json_statistics(result, view)
    else:
        body = reports.render(result, config.output_format, view)
    if human and not options["quiet"]:
        body += text.summary(result)
    trouble = _write(body, target)
    complain([*result.problems, *trouble])
    if not result.files and not result.problems:
        click.echo("warning: no Python files under the given paths", err=True)
    if options["verbose"]:
        for open_end in result.unresolved:
            click.echo(f"{open_end.filename}:{open_end.row}: unresolved: {open_end.message}", err=True)
    if result.problems or trouble:
        return 2
    return int(any(finding.severity != "note" for finding in result.findings) and not options["exit_zero"])


def complain(problems: Sequence[Problem]) -> None:
    """One line on stderr for each thing that could not be done."""
    for problem in problems:
        row = f":{problem.row}" if problem.row else ""
        click.echo(f"{problem.filename}{row}: error: {problem.message}", err=True)


def _mend(
    paths: Sequence[str], result: LintResult, config: Config, options: dict[str, Any], given: dict[str, bytes]
) -> int:
    from graphlint import fix

    files = fix.fixed(result.findings, config.unsafe_fixes, given)
    if options["diff"]:
        for file in files:
            click.echo(file.diff(), nl=False)
        complain(result.problems)
        return 2 if result.problems else int(bool(files) and not options["exit_zero"])
    if given:
        raise click.UsageError("--fix can't write to standard input; use --diff")
    troubles = [trouble for file in files if (trouble := fix.write(file))]
    complain(troubles)
    left = lint(paths, config, options["quiet"]) if files else result
    code = report(left, config, options, given)
    if not options["quiet"] and files:
        click.echo(f"Mended {sum(file.cured for file in files)} in {len(files)} files.", err=True)
    return 2 if troubles else code


def _stdin(paths: Sequence[str], options: dict[str, Any]) -> dict[str, bytes]:
    """Name and text of standard input when it is to be linted."""
    if STDIN not in paths and not options["stdin_filename"]:
        return {}
    others = [path for path in paths if path != STDIN]
    name = options["stdin_filename"] or "stdin.py"
    if [path for path in others if path not in (os.curdir, name)]:
        raise click.UsageError("standard input is linted alone; leave the other paths out")
    return {os.path.normpath(name): sys.stdin.buffer.read()}


def _base(config: Config) -> str:
    """URIs count from the repository's top, since code hosts place findings by them."""
    from graphlint.config import ancestors

    here = config.root if os.path.isdir(config.root) else os.getcwd()
    return next((folder for folder in ancestors(here) if os.path.exists(os.path.join(folder, ".git"))), here)


def _colour(wish: str) -> bool:
    if wish != "auto" or os.environ.get("FORCE_COLOR"):
        return wish != "never"
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _write(body: str, target: str | None) -> list[Problem]:
    if not target:
        sys.stdout.write(body)
        return []
    try:
        folder = os.path.dirname(target)
        if folder:
            os.makedirs(folder, exist_ok=True)
        with open(target, "w", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(body)
    except OSError as error:
        return [Problem(target, 0, f"the report can't be written: {(error.strerror or str(error)).lower()}")]
    return []


def show_files(paths: Sequence[str], config: Config) -> int:
    """`--show-files`: one file a line."""
    from graphlint import discover

    sources, problems = discover.discover(paths, config)
    for source in sources.linted:
        click.echo(source.path)
    complain(problems)
    return 2 if problems else 0


def _watch(paths: Sequence[str], config: Config, options: dict[str, Any]) -> int:
    """`--watch`: lints, then waits for a change; ends with Ctrl-C."""
    from graphlint import discover

    seen: tuple[object, ...] | None = None
    while True:
        sources, _ = discover.discover(paths, config)
        now = tuple((source.file, source.stat) for source in sources)
        if now != seen:
            seen = now
            click.clear()
            once(paths, config, options, {})
            sys.stdout.flush()
            click.echo(f"{time.strftime('%H:%M:%S')} watching {len(sources.linted)} files; Ctrl-C ends", err=True)
        time.sleep(0.5)
