"""`[tool.graphlint]` of `pyproject.toml`, or `graphlint.toml` -> a frozen `Config`.

The nearest configuration upward from what is linted holds for the whole run: a project is analysed as one program.
What is wrong
in it is an error with file and line; nothing is passed over in silence.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from graphlint import rulebook

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NEWEST_TORCH = (
    2,
    13,
)  # verdicts that depend on the release are given for this one unless `target-torch` says otherwise
OLDEST_TORCH = (2, 6)
FORMATS = ("full", "concise", "json", "json-lines", "sarif", "github", "gitlab", "junit")
PROJECT_MARKS = ("pyproject.toml", "graphlint.toml", "setup.py", "setup.cfg", ".git", ".hg")
CONFIG_FILES = ("graphlint.toml", "pyproject.toml")  # of one folder, the first wins
CACHE_FOLDER = ".graphlint_cache"
# fmt: off
EXCLUDE = (  # folders that hold no sources of the project
    ".bzr", ".direnv", ".eggs", ".git", ".graphlint_cache", ".hg", ".ipynb_checkpoints", ".mypy_cache", ".nox",
    ".pants.d", ".pyenv", ".pytest_cache", ".ruff_cache", ".svn", ".tox", ".venv", ".vscode", "__pycache__",
    "__pypackages__", "_build", "buck-out", "dist", "node_modules", "site-packages", "venv",
)
# fmt: on


class ConfigError(ValueError):
    """The configuration can't be used; the message names file, line and cure."""


class Config(msgspec.Struct, frozen=True):
    """All settings of one run. Patterns and relative folders count from `root`."""

    root: str
    file: str = ""  # where it was read, for messages; empty for the built-in settings
    select: tuple[str, ...] = ("ALL",)
    extend_select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    per_file_ignores: tuple[tuple[str, tuple[str, ...]], ...] = ()
    exclude: tuple[str, ...] = EXCLUDE
    extend_exclude: tuple[str, ...] = ()
    force_exclude: bool = False
    respect_gitignore: bool = True
    src: tuple[str, ...] = ()
    target_torch: tuple[int, int] = NEWEST_TORCH
    regions: tuple[str, ...] = ()
    require_reason: bool = False
    cache: bool = True
    cache_dir: str = ""
    output_format: str = "full"
    unsafe_fixes: bool = False


def ancestors(folder: str) -> Iterator[str]:
    """`folder` and every folder above it, nearest first."""
    while True:
        yield folder
        above = os.path.dirname(folder)
        if above == folder:
            return
        folder = above


def find(paths: Sequence[str], isolated: bool = False) -> Config:
    """The configuration that holds for `paths`: nearest upward from the folder they share. Raises `ConfigError`."""
    start = _shared_folder(paths or ["."])
    for folder in () if isolated else ancestors(start):
        for name in CONFIG_FILES:
            found = _read_table(os.path.join(folder, name), name == "pyproject.toml")
            if found is not None:
                return found
    return Config(root=_default_root(start))


def load(file: str) -> Config:
    """The configuration in the file that the user named. Raises `ConfigError`, also for a file without a graphlint
    table.
    """
    found = _read_table(os.path.abspath(file), os.path.basename(file) == "pyproject.toml", must=True)
    if found is None:
        raise ConfigError(f"{file}: has no [tool.graphlint] table; add one or leave --config out")
    return found


def override(config: Config, table: Mapping[str, Any], where: str) -> Config:
    """`config` with the settings of a table of toml keys (`{"target-torch": "2.11"}`). Raises `ConfigError` beginning
    with `where`.
    """
    return msgspec.structs.replace(config, **_settings(table, lambda key: where))


def parse_inline(text: str, config: Config) -> Config:
    """`config` with one `key = value` of the command line on top. Raises `ConfigError`."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--config `{text}` is neither a file nor a `key = value` in TOML: {error}") from error
    return override(config, table, "--config")


def _shared_folder(paths: Sequence[str]) -> str:
    folders = [os.path.abspath(path) for path in paths]
    folders = [path if os.path.isdir(path) else os.path.dirname(path) for path in folders]
    try:
        return os.path.commonpath(folders)
    except ValueError:  # different drives
        return folders[0]


def _default_root(start: str) -> str:
    for folder in ancestors(start):
        if any(os.path.exists(os.path.join(folder, mark)) for mark in PROJECT_MARKS):
            return folder
        if os.path.basename(folder) in EXCLUDE:
            break
    return os.getcwd()


def _read_table(file: str, nested: bool, must: bool = False) -> Config | None:
    try:
        with open(file, "rb") as stream:
            data = stream.read()
    except OSError as error:
        if must or not isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)):
            raise ConfigError(f"{file}: can't be read: {(error.strerror or str(error)).lower()}") from error
        return None
    if nested and not must and b"graphlint" not in data:
        return None
    whole, text = _parse(file, data)
    table: Any = whole
    if nested:
        tool = whole.get("tool", {})
        table = tool.get("graphlint") if isinstance(tool, dict) else None
    if table is None:
        return None
    if not isinstance(table, dict):
        raise ConfigError(f"{file}: `tool.graphlint` is no table; write [tool.graphlint]")
    settings = _settings(table, lambda key: f"{file}:{_line_of(text, key, nested)}")
    return Config(root=os.path.dirname(os.path.abspath(file)), file=file, **settings)


def _parse(file: str, data: bytes) -> tuple[dict[str, Any], str]:
    try:
        text = data.decode("utf-8")
        return tomllib.loads(text), text
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: is no UTF-8 text; save it as UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"line (\d+)", str(error))
        row = found.group(1) if found else data.count(b"\n") + (not data.endswith(b"\n"))
        raise ConfigError(f"{file}:{row}: is no valid TOML: {error}") from error


def _line_of(text: str, key: str, nested: bool) -> int:
    """The line of `key`; toml's parser does not tell, so it is looked for below the table's heading."""
    lines = text.split("\n")
    start = (
        next((i for i, line in enumerate(lines) if re.match(r"\s*\[\s*tool\s*\.\s*graphlint\b", line)), 0)
        if nested
        else 0
    )
    wanted = re.compile(rf"""\s*(\[[^\]]*\b)?["']?{re.escape(key)}["']?\s*[=.\]]""")
    return next((i for i in range(start, len(lines)) if wanted.match(lines[i])), start) + 1


def _settings(table: Mapping[str, Any], where: Any) -> dict[str, Any]:
    settings = {}
    for key, value in table.items():
        field = key.replace("-", "_")
        if field not in _READERS or "_" in key:
            close = difflib.get_close_matches(key, [name.replace("_", "-") for name in _READERS], 1)
            hint = (
                f"did you mean `{close[0]}`?"
                if close
                else f"known keys: {', '.join(sorted(_READERS)).replace('_', '-')}"
            )
            raise ConfigError(f"{where(key)}: unknown key `{key}`; {hint}")
        try:
            settings[field] = _READERS[field](value)
        except ValueError as error:
            raise ConfigError(f"{where(key)}: `{key}` {error}") from error
    return settings


def _strings(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError('must be a list of strings, as in ["a", "b"]')
    return tuple(value)


def _selectors(value: Any) -> tuple[str, ...]:
    """The selectors as given, spaces removed. Raises ValueError for one that stands for no rule."""
    wanted = tuple(part.strip() for part in _strings(value) if part.strip())
    known = _known() if any(not _plain(part) for part in wanted) else set()
    for part in wanted:
        code = part.upper() if re.fullmatch(r"CG\d+", part, re.IGNORECASE) else ""
        if _plain(part) or part in known or (code and any(name.startswith(code) for name in known)):
            continue
        close = difflib.get_close_matches(part, known, 1)
        hint = f"did you mean `{close[0]}`?" if close else "`graphlint rules` lists them"
        raise ValueError(f"names no rule `{part}`; {hint}")
    return wanted


def _plain(selector: str) -> bool:
    return selector.upper() in ("ALL", "CG") or selector in rulebook.SEVERITIES or selector in rulebook.FAMILIES


def _known() -> set[str]:
    book = rulebook.load()
    return {*book.by_name, *book.by_code}


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("must be a string")
    return value


def _format(value: Any) -> str:
    if value not in FORMATS:
        raise ValueError(f"must be one of {', '.join(FORMATS)}")
    return str(value)


def parse_torch(value: Any) -> tuple[int, int]:
    """`"2.11"` -> `(2, 11)`. Raises ValueError for what is no release that graphlint knows."""
    found = re.fullmatch(r"(\d+)\.(\d+)(\.\d+)?(\+\w+)?", value) if isinstance(value, str) else None
    if not found:
        raise ValueError('must be a torch release, as in "2.11"')
    version = int(found.group(1)), int(found.group(2))
    if version < OLDEST_TORCH:
        raise ValueError(f"must be {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} or newer")
    return version


def _per_file(value: Any) -> tuple[tuple[str, tuple[str, ...]], ...]:
    if not isinstance(value, dict):
        raise ValueError('must be a table, as in {"tests/*" = ["CG101"]}')
    return tuple((pattern, _selectors(selectors)) for pattern, selectors in value.items())


def _names(value: Any) -> tuple[str, ...]:
    names = _strings(value)
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(f'holds `{name}`, which is no qualified name; write it like "mylib.graphs.capture"')
    return names


_READERS: dict[str, Any] = {
    "select": _selectors,
    "extend_select": _selectors,
    "ignore": _selectors,
    "per_file_ignores": _per_file,
    "exclude": _strings,
    "extend_exclude": _strings,
    "force_exclude": _flag,
    "respect_gitignore": _flag,
    "src": _strings,
    "target_torch": parse_torch,
    "regions": _names,
    "require_reason": _flag,
    "cache_dir": _text,
    "output_format": _format,
    "unsafe_fixes": _flag,
}
