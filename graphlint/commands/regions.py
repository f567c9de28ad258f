"""`graphlint regions`: what is captured, and how much of it was resolved."""

from __future__ import annotations

import os
from typing import Any

import click

from graphlint.commands.check import complain, lint
from graphlint.commands.options import file_options, settings
from graphlint.findings import RegionInfo


@click.command()
@file_options
@click.option(
    "--output-format", type=click.Choice(["text", "json"]), default="text", help="How to print them.  [default: text]"
)
def regions(paths: tuple[str, ...], **options: Any) -> int:
    """List every capture region under PATHS; no PATHS: the current folder."""
    from graphlint.report.data import json_regions

    wanted = list(paths) or [os.curdir]
    output_format = options.pop("output_format")
    result = lint(wanted, settings(wanted, options), options["quiet"])
    if output_format == "json":
        click.echo(json_regions(result.regions), nl=False)
    else:
        for region in result.regions:
            click.echo(_line(region))
        if not options["quiet"]:
            click.echo(_summary(result.regions, result.files))
    complain(result.problems)
    return 2 if result.problems else 0


def _line(region: RegionInfo) -> str:
    rows = f"{region.row}-{region.end_row}" if region.end_row > region.row else str(region.row)
    open_end = "" if region.resolved else "  (not all of it was resolved)"
    return f"{region.filename}:{rows}: {region.kind} {region.api}: {region.captured}{open_end}"


def _summary(regions: tuple[RegionInfo, ...], files: int) -> str:
    whole = sum(region.resolved for region in regions)
    return f"{len(regions)} capture regions in {files} files; {whole} of them resolved whole."
