"""What the project itself has that captures: context managers, and functions and classes that capture a callable.

Found regions make such facts, and facts make new regions: `search.py` goes round until nothing is added.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from graphlint import ir
from graphlint.regions import apis
from graphlint.regions.scopes import Scope


class Parameter(NamedTuple):
    """A parameter by name, position (without `self`; -1: keyword only) and default."""

    name: str
    position: int
    default: ir.Expr | None = None


class Use(NamedTuple):
    """How another file would use a helper: it calls `name`, and holds one of `near` (its module or class), if any."""

    name: str
    near: tuple[str, ...]


class Wrapper(NamedTuple):
    """A function or class of the project that captures what it is given.

    `takes` are the parameters that hold what is captured; `switches` those that turn capturing on or off. With
    `decorates` the callable comes in a second call, `Wrapper(options)(fn)`. `conditional`: a setting that no call
    shows (`if self.config.enable_cuda_graph`) decides whether it captures.
    """

    kind: str
    takes: tuple[Parameter, ...]
    switches: tuple[Parameter, ...] = ()
    decorates: bool = False
    backward: bool = False
    conditional: bool = False


class Facts:
    """Keyed by canonical dotted name: module of the file, then the dotted name inside it."""

    def __init__(self) -> None:
        self.contexts: dict[str, str] = {}
        self.wrappers: dict[str, Wrapper] = {}
        self.methods: dict[str, str] = {}  # distinctive method names of contexts, for receivers of unknown type
        self.terminals: set[str] = set()
        self.properties: set[str] = set()  # contexts that are read, not called
        self.declared: set[str] = set()
        self.users: set[Use] = set()
        self.size = 0
        self._alias: dict[tuple[str, str], str | None] = {}

    def add_context(self, module: str, scope: Scope, kind: str) -> None:
        """The function or class of `scope` is a context manager that captures, or returns one."""
        name = f"{module}.{scope.qualname}"
        if name in self.contexts:
            return
        self.contexts[name] = kind
        terminal = name.rpartition(".")[2]
        if scope.parent is not None and scope.parent.kind == "class" and distinctive(terminal):
            self.methods[terminal] = kind
            self.users.add(Use(terminal, ()))
        self._grew(module, scope)

    def add_wrapper(self, module: str, scope: Scope, wrapper: Wrapper) -> None:
        """The function or class of `scope` captures what it is given."""
        name = f"{module}.{scope.qualname}"
        known = self.wrappers.get(name)
        if known is not None:
            takes = tuple(dict.fromkeys(known.takes + wrapper.takes))
            merged = known._replace(
                takes=takes,
                decorates=known.decorates or wrapper.decorates,
                backward=known.backward or wrapper.backward,
                conditional=known.conditional and wrapper.conditional,
            )
            if merged == known:
                return
            wrapper = merged
        self.wrappers[name] = wrapper
        self._grew(module, scope)

    def declare(self, name: str) -> None:
        """A name that the configuration says captures: in a `with`, as a decorator, or called with a callable."""
        self.declared.add(name)
        self.contexts[name] = "graph"
        self.wrappers[name] = Wrapper("wrapper", (Parameter("fn", 0),), decorates=True)
        self.terminals.add(name.rpartition(".")[2])
        self.size += 1

    def withdraw(self, name: str) -> None:
        """A declared name that turned out to be no helper."""
        self.contexts.pop(name, None)
        self.wrappers.pop(name, None)
        self.size += 1
        self._alias.clear()

    def versions(self, terminals: set[str]) -> set[tuple[str, object]]:
        """The facts that calls with these terminal names may mean."""
        out: set[tuple[str, object]] = set()
        for name, kind in self.contexts.items():
            if name.rpartition(".")[2] in terminals:
                out.add((name, kind))
        for name, wrapper in self.wrappers.items():
            if name.rpartition(".")[2] in terminals:
                takes = tuple(one.name for one in wrapper.takes)
                out.add((name, (takes, wrapper.decorates, wrapper.backward, wrapper.conditional)))
        return out

    def _grew(self, module: str, scope: Scope) -> None:
        terminal = scope.qualname.rpartition(".")[2]
        self.terminals.add(terminal)
        self.size += 1
        self._alias.clear()
        if terminal in apis.TERMINALS:
            return  # its users are anchored anyway
        around = scope.parent
        if around is None or around.kind == "module":
            self.users.add(Use(terminal, tuple(module.split("."))))
        elif around.kind == "class" and around.parent is not None and around.parent.kind == "module":
            self.users.add(Use(terminal, (around.qualname,)))

    def canonical(self, name: str, near: str, follow: Callable[[str, str], str | None]) -> str | None:
        """The name under which a fact is kept for `name` as seen from the file `near`, re-exports followed; or None."""
        if name.endswith("()"):
            return None  # the result of a call, called
        name = name.replace("()", "")
        if name in self.contexts or name in self.wrappers:
            return name
        if name[:1] == "?" or name.rpartition(".")[2] not in self.terminals:
            return None
        key = (name, near)
        if key not in self._alias:
            self._alias[key] = self._reexport(name) or self._known(follow(name, near))
        return self._alias[key]

    def _known(self, name: str | None) -> str | None:
        return name if name is not None and (name in self.contexts or name in self.wrappers) else None

    def _reexport(self, name: str) -> str | None:
        """`pkg.Thing` for `pkg.inner.Thing`: a package that hands on what its modules define."""
        package, _, terminal = name.rpartition(".")
        if not package:
            return None
        for table in (self.contexts, self.wrappers):
            found = [one for one in table if one.startswith(package + ".") and one.rpartition(".")[2] == terminal]
            if len(found) == 1:
                return found[0]
        return None


def says_so(terminal: str) -> bool:
    """Whether the name of a helper tells its user that it captures or wraps what it is given."""
    return distinctive(terminal) or "wrap" in terminal.lower()


def distinctive(terminal: str) -> bool:
    """Whether a method name alone says that it captures a graph."""
    lower = terminal.lower()
    return "graph" in lower or "captur" in lower
