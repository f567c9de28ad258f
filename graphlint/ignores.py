"""What a walk leaves out: the configured excludes and the `.gitignore` files around and below a folder."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from graphlint.config import Config, ancestors

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec


class Chain:
    """The rules in force in one folder. The configuration decides first; of git's files the innermost that speaks
    about a path.
    """

    __slots__ = ("_declared", "_layers", "_names", "_respect")

    def __init__(
        self, names: frozenset[str], declared: _Layer | None, layers: tuple[_Layer, ...], respect: bool
    ) -> None:
        self._names = names
        self._declared = declared
        self._layers = layers
        self._respect = respect

    def entered(self, folder: str) -> Chain:
        """The chain inside `folder`, which has a `.gitignore` of its own."""
        layer = _read(folder, os.path.join(folder, ".gitignore")) if self._respect else None
        return Chain(self._names, self._declared, (*self._layers, layer), True) if layer else self

    def ignores_file(self, path: str, name: str) -> bool:
        """Whether a Python file is left out (its folders have been asked already)."""
        return name in self._names or self._decide(path, False)

    def ignores_folder(self, path: str, name: str) -> bool:
        """Whether a folder is left out with all that is in it."""
        return name in self._names or self._decide(path, True)

    def _decide(self, path: str, folder: bool) -> bool:
        if self._declared and self._declared.verdict(path, folder):
            return True
        for layer in reversed(self._layers):
            verdict = layer.verdict(path, folder)
            if verdict is not None:
                return verdict
        return False


class _Layer:
    """The patterns of one file or one configuration key, relative to `base`."""

    __slots__ = ("_files", "_folders", "base")

    def __init__(self, base: str, folders: GitIgnoreSpec, python: GitIgnoreSpec) -> None:
        self.base = base
        self._folders = folders
        self._files = python

    def verdict(self, path: str, folder: bool) -> bool | None:
        if not path.startswith(self.base):
            return None
        relative = path[len(self.base) :].lstrip(os.sep)
        if not relative:
            return None
        return (self._folders.check_file(relative + "/") if folder else self._files.check_file(relative)).include


def outer_chain(folder: str, config: Config) -> Chain:
    """The rules in force when a walk starts at `folder`: the configuration's, and git's from the repository's top
    downward.

    A folder that git ignores but the user names is walked all the same, without the outer rules.
    """
    entries = (*config.exclude, *config.extend_exclude)
    names = frozenset(entry for entry in entries if not set(entry) & set("*?[/!"))
    base = config.root if folder.startswith(config.root) else folder
    declared = _layer(base, [entry for entry in entries if entry not in names])
    outer = Chain(frozenset(), None, tuple(_git_layers(folder)) if config.respect_gitignore else (), True)
    ignored = any(outer.ignores_folder(parent, "") for parent in ancestors(folder))
    return Chain(names, declared, () if ignored else outer._layers, config.respect_gitignore)


def excluded(path: str, config: Config) -> bool:
    """Whether a file, or a folder between it and the configuration's, is left out; for files that a hook names one by
    one.
    """
    folder = os.path.dirname(path)
    chain = outer_chain(config.root if path.startswith(config.root) else folder, config)
    between = [parent for parent in ancestors(folder) if parent.startswith(config.root) and parent != config.root]
    inner = chain
    for parent in reversed(between):
        if inner.ignores_folder(parent, os.path.basename(parent)):
            return True
        inner = inner.entered(parent)
    return inner.ignores_file(path, os.path.basename(path))


def _git_layers(folder: str) -> list[_Layer]:
    """The ignore files of the folders above `folder`, outermost first; none when it is in no repository."""
    above = list(ancestors(folder))
    top = next((parent for parent in above if os.path.exists(os.path.join(parent, ".git"))), None)
    if top is None:
        return []
    chain = [parent for parent in reversed(above) if parent.startswith(top) and parent != folder]
    found = [_read(top, os.path.join(top, ".git", "info", "exclude"))]
    found += [_read(parent, os.path.join(parent, ".gitignore")) for parent in chain]
    return [layer for layer in found if layer]


def _read(base: str, file: str) -> _Layer | None:
    try:
        with open(file, encoding="utf-8", errors="replace") as stream:
            return _layer(base, stream.read().splitlines())
    except OSError:
        return None


def _layer(base: str, lines: list[str]) -> _Layer | None:
    lines = [line for line in lines if line.strip() and not line.startswith("#")]
    if not lines:
        return None
    from pathspec import GitIgnoreSpec  # 25 ms, only where there is something to match

    try:
        spec = GitIgnoreSpec.from_lines(lines)
    except Exception:  # a malformed pattern (pathspec's own error or `re.error`) is passed over, as git does
        lines = [line for line in lines if _compiles(line)]
        spec = GitIgnoreSpec.from_lines(lines)
    python = [pattern for pattern, line in zip(spec.patterns, lines, strict=False) if _can_match_python(line)]
    return _Layer(base, spec, GitIgnoreSpec(python))


def _compiles(line: str) -> bool:
    from pathspec import GitIgnoreSpec

    try:
        GitIgnoreSpec.from_lines([line])
    except Exception:
        return False
    return True


def _can_match_python(line: str) -> bool:
    """Whether a pattern can speak about `x.py` itself: a few of the two hundred lines of a usual file do, and each
    costs a regex.
    """
    tail = re.split(r"[*?\]\\]", line.rstrip())[-1]
    return not line.rstrip().endswith("/") and (tail.endswith(".py") or ".py".endswith(tail) or tail == "")
