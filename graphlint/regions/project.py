"""The search over a project: anchored files first, then the users of the helpers they turn out to define."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from graphlint import ir
from graphlint.regions import anchors
from graphlint.regions.derive import Deriver
from graphlint.regions.facts import Facts, Use
from graphlint.regions.region import Region
from graphlint.regions.search import FileSearch, Found

if TYPE_CHECKING:
    from graphlint.link import Project

_ROUNDS = 8  # a helper that wraps a helper that wraps ... ; each round adds at least one fact


class Search:
    """Collects files, learns what captures in them, and lists the regions.

    `declared` are names that the configuration says capture: context managers, or callables that capture their first
    argument (dotted as they are imported, or as defined in the project).
    """

    def __init__(self, project: Project | None = None, declared: Iterable[str] = ()) -> None:
        self.project = project
        self.facts = Facts()
        self.files: dict[str, FileSearch] = {}
        self._found: dict[str, list[Found]] = {}
        self._seen: dict[str, int] = {}
        for name in declared:
            self.facts.declare(name)

    def add(self, summary: ir.Summary) -> None:
        """A file that may hold regions."""
        if summary.path not in self.files:
            self.files[summary.path] = FileSearch(summary, self.facts, self._follow)

    def learn(self) -> set[Use]:
        """Goes round the files until no new helper is found; returns how other files would use them."""
        for _ in range(_ROUNDS):
            before = self.facts.size
            for path, search in self.files.items():
                known = self._known_to(search)
                if self._seen.get(path) != known:
                    self._seen[path] = known
                    self._found[path] = search.found()
                    Deriver(search, self.facts).learn(self._found[path])
            if self.facts.size == before:
                break
        return set(self.facts.users)

    def _known_to(self, search: FileSearch) -> int:
        """A number that changes when a fact appears that this file mentions."""
        return hash(frozenset(self.facts.versions(search.mentions)))

    def regions(self) -> list[Region]:
        """Every region, by file and row, each once."""
        self.learn()
        out: dict[tuple[str, int, int, str], Region] = {}
        for path in sorted(self.files):
            for found in self._found.get(path, ()):
                out.setdefault(found.region.key, found.region)
        return sorted(out.values(), key=lambda region: region.key)

    # -- names across files

    def _follow(self, name: str, near: str) -> str | None:
        """The canonical name of what `name` means as seen from `near`, through re-exports; None when it is outside."""
        return definition(self.project, name, near) if self.project is not None else None


def definition(project: Project, name: str, near: str, depth: int = 0) -> str | None:
    """Follows a dotted name through imports and star imports to the file that defines it."""
    holder, _, symbol = name.rpartition(".")
    module = project.module(holder, near) if holder and depth < 8 else None
    if module is None:
        return None
    for stmt in module.index.get(symbol, ()):
        if isinstance(stmt, (ir.Define, ir.DefineClass)):
            return f"{module.name}.{symbol}"
        if isinstance(stmt, ir.Import) and stmt.symbol:
            found = definition(project, f"{project.absolute(stmt, module)}.{stmt.symbol}", module.path, depth + 1)
            if found is not None:
                return found
    for star in module.stars:
        found = definition(project, f"{project.absolute(star, module)}.{symbol}", module.path, depth + 1)
        if found is not None:
            return found
    return None


def find(summary: ir.Summary, project: Project | None = None, declared: Iterable[str] = ()) -> list[Region]:
    """The regions of one file, as far as the file itself shows them."""
    search = Search(project, declared)
    search.add(summary)
    return search.regions()


def find_all(
    texts: Iterable[tuple[str, str]],
    read: Callable[[str], ir.Summary | None],
    project: Project | None = None,
    declared: Iterable[str] = (),
) -> list[Region]:
    """The regions of a project.

    `texts` are (path, text) of every file, `read` gives the summary of a path (None when it can't be read). Only files
    with an anchor are read, then those that mention a capturing helper of the project.
    """
    declared = tuple(declared)
    search = Search(project, declared)
    waiting: dict[str, str] = {}
    for path, text in texts:
        if anchors.anchored(text, declared):
            _add(search, read(path))
        else:
            waiting[path] = text
    asked: set[Use] = set()
    for _ in range(_ROUNDS):
        new = search.learn() - asked
        if not new:
            break
        asked |= new
        for path in [path for path, text in waiting.items() if anchors.uses(text, new)]:
            del waiting[path]
            _add(search, read(path))
    return search.regions()


def _add(search: Search, summary: ir.Summary | None) -> None:
    if summary is not None:
        search.add(summary)
