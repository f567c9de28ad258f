"""Options that commands share, and how they become a `Config`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click
import msgspec

from graphlint import config as configuration
from graphlint.config import FORMATS, Config, ConfigError

F = TypeVar("F", bound=Callable[..., Any])


def file_options(command: F) -> F:
    """Which files, which configuration, which cache."""
    for option in reversed(
        (
            click.argument("paths", nargs=-1),
            click.option(
                "--config",
                "configs",
                multiple=True,
                metavar="FILE|KEY=VALUE",
                help="A configuration file, or one setting in TOML.",
            ),
            click.option("--isolated", is_flag=True, help="Look for no configuration file."),
            click.option(
                "--exclude",
                multiple=True,
                metavar="PATTERNS",
                help="Leave these out, beside the usual ones (comma separated, gitignore syntax).",
            ),
            click.option(
                "--force-exclude",
                is_flag=True,
                default=None,
                help="Leave excluded files out even when they are named one by one.",
            ),
            click.option("--no-respect-gitignore", is_flag=True, help="Lint what git ignores too."),
            click.option(
                "--target-torch", metavar="RELEASE", help="The torch release that verdicts are for, as in 2.11."
            ),
            click.option("-n", "--no-cache", is_flag=True, help="Neither read nor write the cache."),
            click.option("--cache-dir", metavar="DIR", help="Where to keep the cache.  [env: GRAPHLINT_CACHE_DIR]"),
            click.option(
                "-v", "--verbose", is_flag=True, help="Also say what stayed unresolved, and where the time went."
            ),
            click.option("-q", "--quiet", is_flag=True, help="Print findings only."),
        )
    ):
        command = option(command)
    return command


def settings(paths: Sequence[str], options: dict[str, Any]) -> Config:
    """The configuration of a run: file, then `--config KEY=VALUE`, then the other options. Raises
    `click.UsageError`.
    """
    try:
        found = _base(paths, options)
        found = configuration.override(found, _table(options), "command line")
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    return msgspec.structs.replace(
        found,
        extend_select=(*found.extend_select, *_list(options, "extend_select")),
        ignore=(*found.ignore, *_list(options, "ignore")),
        per_file_ignores=(*found.per_file_ignores, *_per_file(options.get("per_file_ignores", ()))),
        extend_exclude=(*found.extend_exclude, *_list(options, "exclude")),
        force_exclude=options.get("force_exclude") or found.force_exclude,
        respect_gitignore=found.respect_gitignore and not options.get("no_respect_gitignore"),
        unsafe_fixes=options.get("unsafe_fixes") or found.unsafe_fixes,
        cache=not options.get("no_cache"),
    )


def _base(paths: Sequence[str], options: dict[str, Any]) -> Config:
    texts = options.get("configs", ())
    files = [text for text in texts if "=" not in text]
    if len(files) > 1:
        raise ConfigError("--config takes one file; give the others as KEY=VALUE")
    found = (
        configuration.load(files[0]) if files else configuration.find(paths, isolated=options.get("isolated", False))
    )
    for text in texts:
        if "=" in text:
            found = configuration.parse_inline(text, found)
    return found


def _table(options: dict[str, Any]) -> dict[str, Any]:
    """Options that replace a key of the configuration, checked by the same readers as the file."""
    table: dict[str, Any] = {}
    if options.get("select"):
        table["select"] = _list(options, "select")
    for key in ("target_torch", "cache_dir", "output_format"):
        if options.get(key):
            table[key.replace("_", "-")] = options[key]
    for key in ("ignore", "extend_select"):
        configuration.override(
            Config(root="."), {key.replace("_", "-"): _list(options, key)}, f"--{key.replace('_', '-')}"
        )
    if table.get("cache-dir"):
        table["cache-dir"] = os.path.abspath(table["cache-dir"])
    return table


def _list(options: dict[str, Any], key: str) -> list[str]:
    return [part.strip() for text in options.get(key, ()) for part in text.split(",") if part.strip()]


def _per_file(texts: Sequence[str]) -> list[tuple[str, tuple[str, ...]]]:
    """`tests/*:CG101,other.py:rng` -> pairs of a pattern and its selectors."""
    pairs: list[tuple[str, tuple[str, ...]]] = []
    for text in texts:
        for part in text.split(","):
            pattern, colon, selector = part.rpartition(":")
            if not colon:
                raise click.UsageError(f"--per-file-ignores `{part}` has no `:`; write PATTERN:CODE")
            table = configuration.override(
                Config(root="."), {"per-file-ignores": {pattern: [selector]}}, "--per-file-ignores"
            )
            pairs += table.per_file_ignores
    return pairs


FORMAT = click.Choice(FORMATS)
