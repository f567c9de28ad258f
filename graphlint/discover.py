"""Paths -> `Sources`: which files there are, under which module names, and which of them the user meant.

Only folders are listed here, nothing is read but `.gitignore` files. Symbolic links are followed, each folder once, so
a loop
ends; a folder that can't be listed becomes a `Problem`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence

from graphlint import files
from graphlint.config import PROJECT_MARKS, Config, ancestors
from graphlint.files import Source, Sources
from graphlint.findings import Problem
from graphlint.ignores import Chain, excluded, outer_chain

SUFFIX = ".py"
STDIN = "-"


class Stdin:
    """Text handed in instead of a file, and the name it goes by."""

    def __init__(self, name: str, data: bytes) -> None:
        self.name = name
        self.data = data


def discover(paths: Sequence[str], config: Config, stdin: Stdin | None = None) -> tuple[Sources, tuple[Problem, ...]]:
    """Everything that `paths` name, the project around it, and one problem for each path that could not be had."""
    search = _Search(config)
    linted: dict[str, str] = {}  # absolute path -> shown path
    for path in () if stdin else paths:
        for file, name in search.named(path):
            linted.setdefault(file, name)
    if stdin:
        linted[os.path.abspath(stdin.name)] = stdin.name
    homes = [os.path.abspath(path) for path in paths if not stdin and os.path.isdir(path)]
    projects = {root for folder in _folders(linted) if (root := search.project_root(folder))}
    around = [root for root in sorted(projects) if not any(_inside(root, home) for home in homes)]
    context = {file: files.shown(file) for root in around for file, _ in search.below(root, root) if file not in linted}
    names = _Names(homes, projects, config)
    known = [_source(names, file, name, stdin) for file, name in sorted(linted.items(), key=lambda item: item[1])]
    beside = [_source(names, file, name, None) for file, name in sorted(context.items())]
    lone = [source.root for source in known if not search.project_root(os.path.dirname(source.file))]
    named = [os.path.abspath(path) for path in ([stdin.name] if stdin else paths)]
    return Sources(known, beside, names.roots, lone, linted.keys() & named), tuple(search.problems)


def _inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


def _folders(linted: Iterable[str]) -> set[str]:
    return {os.path.dirname(file) for file in linted}


def _source(names: _Names, file: str, shown: str, stdin: Stdin | None) -> Source:
    root = names.root_of(file)
    return Source(files.printable(shown), file, files.module_name(file, root), root, stdin.data if stdin else None)


class _Search:
    """Walks folders; remembers problems and what it has seen."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.problems: list[Problem] = []
        self._projects: dict[str, str | None] = {}

    def named(self, path: str) -> Iterator[tuple[str, str]]:
        """`(absolute, shown)` of each Python file that one argument of the command line stands for."""
        whole = os.path.abspath(path)
        name = files.shown(whole) if os.path.isabs(path) else os.path.normpath(path)
        if os.path.isdir(whole):
            yield from self.below(whole, "" if name == os.curdir else name)
        elif not os.path.isfile(whole):
            what = "is not a regular file" if os.path.exists(whole) else "does not exist"
            self.problems.append(Problem(files.printable(name), 0, f"{what}; name a Python file or a folder"))
        elif not self.config.force_exclude or not excluded(whole, self.config):
            yield whole, name

    def below(self, folder: str, name: str) -> Iterator[tuple[str, str]]:
        """All Python files below `folder` that are not excluded, in the order of their names; real folders before
        linked ones.
        """
        seen: set[tuple[int, int]] = set()
        links: list[tuple[str, str, Chain]] = []
        yield from self._walk(folder, name, outer_chain(folder, self.config), seen, links)
        while links:
            yield from self._walk(*links.pop(0), seen, links)

    def _walk(
        self, folder: str, name: str, chain: Chain, seen: set[tuple[int, int]], links: list[tuple[str, str, Chain]]
    ) -> Iterator[tuple[str, str]]:
        stack = [(folder, name, chain)]
        while stack:
            folder, name, chain = stack.pop()
            entries = self._list(folder, name, seen)
            if any(entry.name == ".gitignore" for entry in entries):
                chain = chain.entered(folder)
            inner: list[tuple[str, str, Chain]] = []
            for entry in entries:
                shown = f"{name}{os.sep}{entry.name}" if name else entry.name
                if entry.name.endswith(SUFFIX) and _is_file(entry):
                    if not chain.ignores_file(entry.path, entry.name):
                        yield entry.path, shown
                elif _is_dir(entry) and not chain.ignores_folder(entry.path, entry.name):
                    (links if entry.is_symlink() else inner).append((entry.path, shown, chain))
            stack.extend(reversed(inner))

    def _list(self, folder: str, name: str, seen: set[tuple[int, int]]) -> list[os.DirEntry[str]]:
        try:
            found = os.stat(folder)
            if (found.st_dev, found.st_ino) in seen:
                return []
            seen.add((found.st_dev, found.st_ino))
            with os.scandir(folder) as entries:
                return sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            self.problems.append(
                Problem(files.printable(name or os.curdir), 0, f"can't be listed: {files.reason(error)}")
            )
            return []

    def project_root(self, folder: str) -> str | None:
        """The nearest folder upward that looks like a project's, or None; what is installed belongs to none."""
        if folder not in self._projects:
            self._projects[folder] = _project_root(folder, self.config)
        return self._projects[folder]


def _project_root(folder: str, config: Config) -> str | None:
    start = folder
    while os.path.exists(os.path.join(start, "__init__.py")) and os.path.dirname(start) != start:
        start = os.path.dirname(start)
    for parent in ancestors(start):
        if any(os.path.exists(os.path.join(parent, mark)) for mark in PROJECT_MARKS):
            return parent
        if os.path.basename(parent) in config.exclude:  # `.venv`, `site-packages`
            return None
    return None


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:
        return False


def _is_dir(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads to itself
        return False


class _Names:
    """Files -> the folder that their module names start from."""

    def __init__(self, homes: Sequence[str], projects: Iterable[str], config: Config) -> None:
        layouts = [layout for root in sorted(projects) for layout in (os.path.join(root, "src"), root)]
        declared = [os.path.join(config.root, root) for root in config.src]
        self._bases = [base for base in dict.fromkeys((*declared, *layouts, *homes)) if os.path.isdir(base)]
        self._packages: dict[str, None] = {}
        self._by_folder: dict[str, str] = {}
        self._has_init: dict[str, bool] = {}

    @property
    def roots(self) -> tuple[str, ...]:
        """All roots, the declared ones and the projects' first, then the folders above packages."""
        return tuple(dict.fromkeys((*self._bases, *self._packages)))

    def root_of(self, file: str) -> str:
        """The folder above the outermost package, else the base that a namespace package or a script is named from."""
        folder = os.path.dirname(file)
        if folder not in self._by_folder:
            self._by_folder[folder] = self._package_root(folder) if self._package(folder) else self._base_of(folder)
        return self._by_folder[folder]

    def _package(self, folder: str) -> bool:
        if folder not in self._has_init:
            self._has_init[folder] = os.path.exists(os.path.join(folder, "__init__.py"))
        return self._has_init[folder]

    def _package_root(self, folder: str) -> str:
        while self._package(folder) and os.path.dirname(folder) != folder:
            folder = os.path.dirname(folder)
        self._packages[folder] = None
        return folder

    def _base_of(self, folder: str) -> str:
        for base in self._bases:
            if folder == base:
                return base
            inner = os.path.relpath(folder, base) if _inside(folder, base) else ""
            if inner and all(part.isidentifier() for part in inner.split(os.sep)):
                return base
        return folder
