"""`graphlint rules` and `graphlint explain`: the rulebook in the terminal."""

from __future__ import annotations

import difflib
from typing import Any

import click

from graphlint import rulebook
from graphlint.report.data import dump
from graphlint.report.page import page
from graphlint.rulebook import Rule

_FORMAT = click.Choice(["text", "json"])


@click.command()
@click.option("--output-format", type=_FORMAT, default="text", help="How to print them.  [default: text]")
@click.option("--family", type=click.Choice(rulebook.FAMILIES), help="Only the rules of one family.")
def rules(output_format: str, family: str | None) -> int:
    """List the rules: code, severity, name, and the first sentence of the page."""
    book = [rule for rule in rulebook.load().rules if family in (None, rule.family)]
    if output_format == "json":
        click.echo(dump([as_dict(rule) for rule in book]), nl=False)
        return 0
    wide = max((len(rule.name) for rule in book), default=0)
    for name in rulebook.FAMILIES:
        group = [rule for rule in book if rule.family == name]
        if group:
            click.secho(name, bold=True)
        for rule in group:
            click.echo(f"  {rule.code}  {rule.severity:<6}  {rule.name:<{wide}}  {_short(rule.summary)}")
    return 0


def _short(text: str, most: int = 100) -> str:
    return text if len(text) <= most else text[: text.rindex(" ", 0, most)] + " ..."


@click.command()
@click.argument("rule", metavar="CODE|NAME")
@click.option("--output-format", type=_FORMAT, default="text", help="How to print it.  [default: text]")
def explain(rule: str, output_format: str) -> int:
    """Show the page of one rule: what it finds, why that is bad, examples, the cure."""
    book = rulebook.load()
    found = book.get(rule)
    if found is None:
        close = difflib.get_close_matches(rule, [*book.by_name, *book.by_code], 1)
        hint = f"did you mean `{close[0]}`?" if close else "`graphlint rules` lists them"
        raise click.UsageError(f"no rule `{rule}`; {hint}")
    click.echo(dump([as_dict(found)]) if output_format == "json" else page(found), nl=False)
    return 0


def as_dict(rule: Rule) -> dict[str, Any]:
    """One rule as `--output-format json` prints it."""
    fields = ("code", "name", "family", "severity", "summary", "message", "help", "fix", "since")
    return {**{field: getattr(rule, field) for field in fields}, "explanation": rule.page, "url": rule.url}
