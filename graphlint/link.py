"""Names across files: modules, classes and what an import means.

`Project` answers by demand: a module is read when something asks for a name in it, never before. A module that is not
in the
project is a `Symbol`: `torch.cuda.graph` stays a qualified name. What a name means is settled lazily by the flow, which
runs
the one statement that binds it; here stands only where that statement is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from graphlint import ir

if TYPE_CHECKING:
    from graphlint.flow.values import Scope, Value

# Never read as project code, even where it lies beside it: their meaning is built in.
KNOWN_OUTSIDE = frozenset(
    {"torch", "numpy", "math", "random", "time", "os", "sys", "logging", "functools", "contextlib"}
)


class Reader(Protocol):
    """Who can find and read a module: `name` is dotted, `near` the path of the file that asks."""

    def summary(self, name: str, near: str) -> ir.Summary | None: ...


class Module:
    """One file of the project; `index` says which statements bind a name at its top level."""

    def __init__(self, summary: ir.Summary, shared: dict[Any, Any]) -> None:
        self.summary = summary
        self.path = summary.path
        self.name = summary.module
        self.scope: Scope | None = None
        self.binding: set[str] = set()
        self._shared = shared

    @property
    def index(self) -> dict[str, list[ir.Stmt]]:
        """Which statements bind a name at its top level; imports of everything stand under `*`."""
        key = ("index", self.path)
        if key not in self._shared:
            index: dict[str, list[ir.Stmt]] = {}
            self._shared[key] = index
            for name, stmt in _bindings(self.summary.body):
                index.setdefault(name, []).append(stmt)
        found: dict[str, list[ir.Stmt]] = self._shared[key]
        return found

    @property
    def stars(self) -> list[ir.Import]:
        """Its `from ... import *`."""
        return [stmt for stmt in self.index.get("*", ()) if isinstance(stmt, ir.Import)]

    @property
    def rebound(self) -> frozenset[str]:
        """The names at its top level that functions of the file bind anew (`global NAME`)."""
        key = ("rebound", self.path)
        if key not in self._shared:
            self._shared[key] = frozenset(_global_names(self.summary.body))
        found: frozenset[str] = self._shared[key]
        return found

    @property
    def package(self) -> str:
        """The package that relative imports count from."""
        return self.name if self.summary.is_package else self.name.rpartition(".")[0]

    def __repr__(self) -> str:
        return f"Module({self.name})"


def _bindings(body: Iterable[ir.Stmt]) -> Iterator[tuple[str, ir.Stmt]]:
    """Which statement at the top level binds which name, through `if`, `try` and `with`."""
    for stmt in body:
        if isinstance(stmt, ir.Assign):
            if stmt.value is not None:
                for target in stmt.targets:
                    for name in target_names(target):
                        yield name, stmt
        elif isinstance(stmt, ir.Import):
            yield ("*" if stmt.symbol == "*" else stmt.name), stmt
        elif isinstance(stmt, ir.Define):
            yield stmt.func.name, stmt
        elif isinstance(stmt, ir.DefineClass):
            yield stmt.cls.name, stmt
        else:
            yield from _bindings(inner(stmt))


def _global_names(body: Iterable[ir.Stmt]) -> Iterator[str]:
    for stmt in body:
        if isinstance(stmt, ir.Scope) and stmt.kind == "global":
            yield from stmt.names
        elif isinstance(stmt, ir.Define):
            yield from _global_names(stmt.func.body)
        elif isinstance(stmt, ir.DefineClass):
            yield from _global_names(stmt.cls.body)
        else:
            yield from _global_names(inner(stmt))


def inner(stmt: ir.Stmt) -> Iterator[ir.Stmt]:
    """The statements inside a compound statement, not those of nested functions or classes."""
    if isinstance(stmt, (ir.If, ir.While, ir.For)):
        yield from stmt.body
        yield from stmt.orelse
    elif isinstance(stmt, ir.With):
        yield from stmt.body
    elif isinstance(stmt, ir.Try):
        yield from stmt.body
        for handler in stmt.handlers:
            yield from handler.body
        yield from stmt.orelse
        yield from stmt.final
    elif isinstance(stmt, ir.Match):
        for case in stmt.cases:
            yield from case.body


def target_names(target: ir.Expr) -> Iterator[str]:
    """The plain names that an assignment target binds."""
    if isinstance(target, ir.Name):
        yield target.id
    elif isinstance(target, ir.Sequence):
        for item in target.items:
            yield from target_names(item)
    elif isinstance(target, ir.Star):
        yield from target_names(target.value)


def nodes_in(node: object) -> Iterator[msgspec.Struct]:
    """Every statement and expression of a piece of code, outermost first."""
    if isinstance(node, (tuple, list)):
        for one in node:
            yield from nodes_in(one)
    elif isinstance(node, msgspec.Struct):
        yield node
        for field in node.__struct_fields__:
            if field != "at":
                yield from nodes_in(getattr(node, field))


def names_in(node: object) -> Iterator[str]:
    """Every name that an expression mentions."""
    return (one.id for one in nodes_in(node) if isinstance(one, ir.Name))


class ClassInfo:
    """A class of the project: its methods and class attributes by name, and its bases once the flow has resolved
    them."""

    def __init__(self, cls: ir.Class, module: Module, scope: Scope) -> None:
        self.cls = cls
        self.name = cls.name
        self.module = module
        self.scope = scope
        self.methods: dict[str, ir.Function] = {}
        self.fields: list[ir.Assign] = []
        self.attributes: dict[str, ir.Assign] = {}
        self.bases: list[ClassInfo | str] = []
        self.dataclass = False
        self.metaclass: Value | None = None
        self.slots: dict[str, Value] = {}
        for stmt in _class_statements(cls.body):
            if isinstance(stmt, ir.Define):
                # a property's setter shares the name; the getter is what reading runs
                if not any(
                    isinstance(deco, ir.Attr) and deco.name in ("setter", "deleter") for deco in stmt.func.decorators
                ):
                    self.methods[stmt.func.name] = stmt.func
                else:
                    self.methods[stmt.func.name + ".setter"] = stmt.func
            elif isinstance(stmt, ir.Assign):
                for target in stmt.targets:
                    for name in target_names(target):
                        self.attributes[name] = stmt
                if stmt.annotation is not None:
                    self.fields.append(stmt)

    def mro(self) -> list[ClassInfo | str]:
        """Itself, then its bases, depth first, each once; a string is a class outside the project."""
        seen: list[ClassInfo | str] = []

        def visit(cls: ClassInfo | str) -> None:
            if cls in seen or len(seen) > 60:
                return
            seen.append(cls)
            if isinstance(cls, ClassInfo):
                for base in cls.bases:
                    visit(base)

        visit(self)
        return seen

    def find(self, name: str) -> tuple[ir.Function, ClassInfo] | None:
        """The method of that name and the class that defines it."""
        for cls in self.mro():
            if isinstance(cls, ClassInfo) and name in cls.methods:
                return cls.methods[name], cls
        return None

    def find_after(self, owner: ClassInfo, name: str) -> tuple[ir.Function, ClassInfo] | None:
        """What `super().name` means inside `owner`, for an object of this class."""
        order = self.mro()
        start = order.index(owner) + 1 if owner in order else 0
        for cls in order[start:]:
            if isinstance(cls, ClassInfo) and name in cls.methods:
                return cls.methods[name], cls
        return None

    def outside(self) -> list[str]:
        """The qualified names of its bases outside the project."""
        return [cls for cls in self.mro() if isinstance(cls, str)]

    def is_a(self, *names: str) -> bool:
        """Whether a base outside the project has one of these qualified names."""
        return any(name in names for name in self.outside())

    @property
    def is_module(self) -> bool:
        """Whether it is a `torch.nn.Module`, or of a class outside whose name says so."""
        return any(
            name == "torch.nn.Module" or name.startswith("torch.nn.") or name.endswith("Module")
            for name in self.outside()
        )

    def __repr__(self) -> str:
        return f"ClassInfo({self.name})"


def _class_statements(body: Iterable[ir.Stmt]) -> Iterator[ir.Stmt]:
    for stmt in body:
        yield stmt
        if isinstance(stmt, (ir.If, ir.Try, ir.With)):
            yield from _class_statements(inner(stmt))


class Project:
    """The modules of the project, read by demand."""

    def __init__(self, reader: Reader, shared: dict[Any, Any] | None = None) -> None:
        """`shared` holds what follows from the texts alone, for all projects over the same reader."""
        self.reader = reader
        self.shared: dict[Any, Any] = {} if shared is None else shared
        self.modules: dict[tuple[str, str], Module | None] = {}
        self.by_path: dict[str, Module] = {}

    def add(self, summary: ir.Summary) -> Module:
        """A file that is analysed for itself."""
        found = self.by_path.get(summary.path)
        if found is None:
            found = self.by_path[summary.path] = Module(summary, self.shared)
        return found

    def module(self, name: str, near: str) -> Module | None:
        """The project's module of that dotted name as seen from the file `near`, or None when it is outside."""
        if not name or name.split(".")[0] in KNOWN_OUTSIDE:
            return None
        folder = near.replace("\\", "/").rpartition("/")[0]
        key = (name, folder)
        if key not in self.modules:
            summary = self.reader.summary(name, near)
            self.modules[key] = self.add(summary) if summary is not None else None
        return self.modules[key]

    def absolute(self, stmt: ir.Import, module: Module) -> str:
        """The dotted name that an import statement in `module` means."""
        if not stmt.level:
            return stmt.module
        parts = module.package.split(".") if module.package else []
        if stmt.level > 1:
            parts = parts[: len(parts) - (stmt.level - 1)]
        return ".".join([*parts, stmt.module] if stmt.module else parts)
