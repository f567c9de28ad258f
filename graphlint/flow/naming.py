"""Imports and module names: the statement that binds a name at a module's top level runs when something asks for the name."""

from __future__ import annotations

import contextlib

from graphlint import ir
from graphlint.flow import events as ev
from graphlint.flow import torchlib
from graphlint.flow.state import NORMAL, OutOfBudget
from graphlint.flow.statements import Statements
from graphlint.flow.values import (
    UNKNOWN,
    ClassValue,
    Closure,
    Holder,
    Host,
    Instance,
    ModuleValue,
    Scope,
    Unknown,
    Value,
    join,
)
from graphlint.link import Module

MAX_IMPORTED = 16  # modules of the project whose top level is run for what it does, beside binding names
MAX_IMPORT_STEPS = 600  # of one of them


class Naming(Statements):
    """What imports bind, and what importing a module of the project does beside binding names."""

    # -- imports and module names

    def _Import(self, node: ir.Import) -> int:
        scope = self.frame.scope
        if node.symbol == "*":
            source = self.project.module(self.project.absolute(node, self.frame.module), self.frame.module.path)
            if source is not None:
                for name in list(source.index):
                    if not name.startswith("_"):
                        scope.slots.setdefault(name, self.member(source, name))
            return NORMAL
        self.put(scope, node.name, self.imported(node, self.frame.module))
        if self.whole:
            self._import_effects(node, self.frame.module)
        return NORMAL

    def _import_effects(self, node: ir.Import, module: Module) -> None:
        """What importing a module of the project does beside binding names: decorators that enter things in a registry,
        calls at its top level."""
        name = self.project.absolute(node, module)
        for wanted in (name, f"{name}.{node.symbol}" if node.symbol else ""):
            source = self.project.module(wanted, module.path) if wanted else None
            if source is None or source in self.imported_modules or len(self.imported_modules) >= MAX_IMPORTED:
                continue
            self.imported_modules.add(source)
            outer = self.open, self.budget
            self.open, self.budget = [], min(self.budget, MAX_IMPORT_STEPS)
            with (
                self.entered(ev.Frame(self.frame, "<module>", source, self.module_scope(source), None)),
                contextlib.suppress(OutOfBudget),
            ):
                for stmt in source.summary.body:
                    self._import_effect(stmt, source)
            self.open, self.budget = outer

    def _import_effect(self, stmt: ir.Stmt, source: Module) -> None:
        """One statement at the top level of a module that is imported."""
        if isinstance(stmt, ir.Import):
            self._import_effects(stmt, source)
        elif isinstance(stmt, ir.Do) and isinstance(stmt.value, ir.Call):
            self.run(stmt)
        elif isinstance(stmt, (ir.Define, ir.DefineClass)):
            made = stmt.func if isinstance(stmt, ir.Define) else stmt.cls
            if self.frame.scope.slots.get(made.name) is None and (
                any(self._enters(deco) for deco in made.decorators) or self._hooked(stmt)
            ):
                self.run(stmt)

    def _hooked(self, stmt: ir.Stmt) -> bool:
        """Whether a class has a base of the project that is told of its subclasses, or a metaclass of the project."""
        if not isinstance(stmt, ir.DefineClass):
            return False
        meta = [word.value for word in stmt.cls.keywords if word.name == "metaclass"]
        if meta and isinstance(self.eval(meta[0]), ClassValue):
            return True
        values = [self.eval(base) for base in stmt.cls.bases if isinstance(base, (ir.Name, ir.Attr))]
        return any(
            isinstance(value, ClassValue)
            and (value.cls.find("__init_subclass__") is not None or value.cls.metaclass is not None)
            for value in values
        )

    def _enters(self, deco: ir.Expr) -> bool:
        """Whether a decorator is a call of something of the project, as those of registries are."""
        root = deco
        while isinstance(root, (ir.Call, ir.Attr)):
            root = root.func if isinstance(root, ir.Call) else root.obj
        value = self.eval(root) if isinstance(root, ir.Name) else UNKNOWN
        return isinstance(value, (Closure, Instance, ModuleValue, ClassValue))

    def imported(self, node: ir.Import, module: Module) -> Value:
        """What an import statement binds."""
        name = self.project.absolute(node, module)
        if not node.symbol:
            wanted = name if node.name != name.split(".")[0] else node.name
            found = self.project.module(wanted, module.path)
            return ModuleValue(found) if found is not None else torchlib.symbol(wanted)
        source = self.project.module(name, module.path)
        if source is not None and source is not module:
            scope = self.module_scope(source)
            value = scope.slots.get(node.symbol) or self.global_name(scope, node.symbol)
            if value is not None:
                return value
        sub = self.project.module(f"{name}.{node.symbol}", module.path)
        if sub is not None:
            return ModuleValue(sub)
        return Unknown(node.symbol) if source is not None or node.level else torchlib.symbol(f"{name}.{node.symbol}")

    def global_name(self, scope: Scope, name: str) -> Value | None:
        """Runs the statement that binds a name at a module's top level, on first use."""
        module = scope.module
        if module is None or name in module.binding:
            return None
        stmts = module.index.get(name)
        if not stmts:
            return self._starred(module, scope, name)
        module.binding.add(name)
        try:
            outer_open, self.open = self.open, []
            first = len(self.events)
            frame = ev.Frame(self.frame, "<module>", module, scope, None)
            values: list[Value] = []
            with self.entered(frame):
                for stmt in stmts[:4]:
                    self.run(stmt)
                    if name in scope.slots:
                        values.append(scope.slots[name])
            self.open = outer_open
            # bound late only by us: the program did it at its start
            self.events[first:] = [
                event
                for event in self.events[first:]
                if not (isinstance(event, ev.WriteEvent) and event.cell.holder is scope)
            ]
        finally:
            module.binding.discard(name)
        if not values:
            return None
        useful = [
            value
            for value in values
            if not (isinstance(value, Host) and value.kind == "none") and not isinstance(value, Unknown)
        ]
        chosen = join(*useful) if useful else values[-1]
        if len(values) > 1 and isinstance(stmts[0], ir.Import) and useful:
            chosen = useful[0]
        if not self.whole and name in module.rebound and isinstance(chosen, Host):
            chosen = join(
                chosen, UNKNOWN
            )  # a function of the file sets it, in a part of the program that is not walked
        if isinstance(chosen, Holder):
            chosen.born = 0  # there since the import, wherever it is first asked for
        scope.slots[name] = chosen
        return chosen

    def _starred(self, module: Module, scope: Scope, name: str) -> Value | None:
        if name.startswith("__") or name in module.binding:
            return None
        module.binding.add(name)
        try:
            for star in module.stars:
                full = self.project.absolute(star, module)
                source = self.project.module(full, module.path)
                if source is not None and source is not module:
                    inner = self.module_scope(source)
                    found = inner.slots.get(name) or self.global_name(inner, name)
                    if found is not None:
                        scope.slots[name] = found
                        return found
        finally:
            module.binding.discard(name)
        return None
