"""Statements, scopes and imports: the walk over a program, in the order in which it would run.

One walk begins at a program's own entry (`walk_main`) or, for a region that no entry reaches, at the function around it
with made-up arguments
(`walk_function`). Branches that can't be decided are both walked and joined; loops take two rounds, or their known
length up to a few. See
`state.py` for why it ends.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from graphlint import ir
from graphlint.flow import contexts, graphs, pylib, torchlib
from graphlint.flow import events as ev
from graphlint.flow.calls import Calls
from graphlint.flow.state import BREAK, CONTINUE, MAX_REGION_STEPS, MAX_ROUNDS, NORMAL, RAISE, RETURN, OutOfBudget
from graphlint.flow.values import (
    DEFAULT,
    NO,
    NONE,
    REST,
    TRUE,
    UNKNOWN,
    Bound,
    Cell,
    Choice,
    ClassValue,
    Closure,
    External,
    Holder,
    Host,
    Instance,
    Items,
    Mapping,
    ModuleValue,
    Scope,
    Symbol,
    Tensor,
    Unknown,
    Value,
    alternatives,
    const,
    join,
)
from graphlint.link import ClassInfo, Module

_START: ir.Span = (1, 0, 1, 0)
_EAGER = re.compile(r"(^|_)eager(_mode|_only)?$")
MAX_IMPORTED = 16  # modules of the project whose top level is run for what it does, beside binding names
MAX_IMPORT_STEPS = 600  # of one of them
Narrowing = tuple[tuple[Scope | Holder, Any, Value, Value], ...]


def _only_raises(body: Sequence[ir.Stmt]) -> bool:
    """Whether a block does nothing but raise, after putting its message together."""
    return (
        bool(body)
        and isinstance(body[-1], ir.Raise)
        and all(isinstance(stmt, (ir.Assign, ir.Do)) for stmt in body[:-1])
    )


def _binds_once(node: ir.If) -> bool:
    """`if x is None: x = given`, and else at most a check of it."""
    plain = (
        len(node.body) == 1
        and isinstance(node.body[0], ir.Assign)
        and isinstance(node.body[0].value, (ir.Name, ir.Attr, ir.Const))
        and isinstance(node.body[0].targets[0], ir.Attr)
    )
    checks = all(
        isinstance(stmt, ir.Raise) or (isinstance(stmt, ir.If) and _only_raises(stmt.body) and not stmt.orelse)
        for stmt in node.orelse
    )
    return plain and checks and isinstance(node.test, ir.Compare) and node.test.ops == ("is",)


class Machine(Calls):
    """Walks programs; what happened stands in `events` and `captures`."""

    def truth(self, value: Value) -> bool | None:
        """Whether Python would take it for true; None when that is not known. Inside a region the environment is the
        default one: checks that a variable switches on are off."""
        if not self.open and any(isinstance(one, Host) and "env" in one.marks for one in alternatives(value)):
            return None
        return super().truth(value)

    def happen(self, kind: type[ev.Event], at: ir.Span, *facts: Any, **more: Any) -> Any:
        """Records an event; inside a region, it is sure when the region comes to it on every way."""
        event = super().happen(kind, at, *facts, **more)
        if self.open and not event.sure and self.doubt <= self.open[-1].doubt:
            event.sure = True
        return event

    # -- entries

    def walk_main(self, module: Module) -> None:
        """Runs a file as `__main__`, top to bottom."""
        self.whole = True
        scope = Scope(module.name, module, None, 0)
        scope.slots["__name__"] = const("__main__")
        scope.slots["__file__"] = Host("str")
        module.scope = scope
        self.frame = ev.Frame(None, "<module>", module, scope, None)
        self._guarded(lambda: self.run_block(module.summary.body))
        self._guarded(self._call_unused)

    def walk_function(self, module: Module, qualname: str, around: bool = True) -> None:
        """Runs the function `qualname` of a module with made-up arguments; a method gets a made-up object, whose other
        methods are walked afterwards."""
        self.budget = MAX_REGION_STEPS
        self.default_device = DEFAULT  # callers may build under `with torch.device("cuda")`
        scope = self.module_scope(module)
        self.frame = ev.Frame(None, "<module>", module, scope, None)
        self._guarded(lambda: self._walk_from(module, qualname, around))
        self._guarded(self._call_unused)

    def _call_unused(self) -> None:
        """What was compiled with CUDA graphs and never called is called once, with tensors where its parameters are
        used as such."""
        for func in list(self.compiled):
            target = func.func
            method = target.cls.find("forward") if isinstance(target, Instance) else None
            closure = self.method_closure(*method) if method else (target.func if isinstance(target, Bound) else target)
            if func.facts.get("graphs") and not func.facts["calls"] and isinstance(closure, Closure):
                known = self._tensor_parameters(closure)
                params = [
                    param for param in closure.func.params if param.kind == "pos" and param.name not in ("self", "cls")
                ]
                args: list[Value] = [
                    self.tensor(_START, "cuda")
                    if param.name in known
                    else self.of_annotation(param.annotation, closure.module, _START, param.name)
                    for param in params
                ]
                self.call(func, args, {}, func.facts["at"])

    def _guarded(self, run: Callable[[], Any]) -> None:
        try:
            run()
        except (OutOfBudget, RecursionError):
            self.unresolved.setdefault((self.frame.module.path, 0), "the walk was cut off by its bound")
        self.journal = None
        self.doubt = 0

    def _walk_from(self, module: Module, qualname: str, around: bool) -> None:
        parts = qualname.split(".")
        head = self.member(module, parts[0])
        if isinstance(head, ClassValue) and len(parts) > 1:
            obj = self.made_up(head.cls, _START)
            if not self._has_captured(
                qualname
            ):  # the constructor may have called it, at the right moment and with the right arguments
                self._call_made_up(self.attribute(obj, parts[1], _START), _START)
            if around and isinstance(obj, Instance):
                self._lifecycle(obj, parts[1])
        elif isinstance(head, (Closure, Bound)) or head is not None:
            self._call_made_up(head, _START)

    def _lifecycle(self, obj: Instance, first: str) -> None:
        """After the method that captures, every other public method once: what they rebind or replay shows."""
        if not self.captures:
            return
        for _ in range(2):  # twice: what one call keeps, the next one overwrites
            seen = len(self.events)
            for cls in obj.cls.mro():
                if not isinstance(cls, ClassInfo):
                    continue
                for name, func in cls.methods.items():
                    if name in (first, "__init__", "__new__", "__del__", "__repr__") or "." in name or func.is_async:
                        continue
                    self._call_made_up(self.attribute(obj, name, _START), _START)
            if not any(isinstance(event, ev.ReplayEvent) for event in self.events[seen:]):
                return

    def _has_captured(self, qualname: str) -> bool:
        return any(frame.name == qualname for capture in self.captures for frame, _, _ in capture.stack)

    def _call_made_up(self, func: Value, at: ir.Span) -> None:
        if isinstance(func, (Closure, Bound, Instance, Choice)):
            args: list[Value] = []
            self.call(func, args, {}, at)
            while self.open:  # begun in one method and ended in another: what the user does between is not seen here
                graphs.end(self, self.open[-1], at)

    def made_up(self, cls: ClassInfo, at: ir.Span) -> Value:
        """An object of a class with unknown constructor arguments; one per class."""
        key = ("made", id(cls))
        if key in self.memo:
            found: Value = self.memo[key]
            return found
        obj = Instance(cls, (cls.module.path, cls.cls.at[0]), self.tick(), True)
        self.memo[key] = obj
        self.init(obj, [], {}, at)
        return obj

    # -- functions

    def run_body(self, func: ir.Function) -> None:
        self.frame.scope.names = frozenset(func.bound_names)
        self.run_block(func.body)

    def run_block(self, body: Sequence[ir.Stmt]) -> int:
        for stmt in body:
            self.budget -= 1
            if self.budget < 0:
                raise OutOfBudget
            status = self.run(stmt)
            if status != NORMAL:
                return status
        return NORMAL

    def run(self, stmt: ir.Stmt) -> int:
        status: int = getattr(self, "_" + type(stmt).__name__)(stmt)
        return status

    # -- simple statements

    def _Assign(self, node: ir.Assign) -> int:
        if node.value is None:
            return NORMAL
        value = self.eval(node.value)
        if isinstance(value, Unknown) and node.annotation is not None:
            value = self.of_annotation(node.annotation, self.frame.module, node.at)
        for target in node.targets:
            self.assign(target, value, node.at)
        return NORMAL

    def assign(self, target: ir.Expr, value: Value, at: ir.Span, how: str = "assign") -> None:
        if isinstance(target, ir.Name):
            scope = self.frame.scope.redirect.get(target.id, self.frame.scope)
            self.write(scope, target.id, value, at, how)
        elif isinstance(target, ir.Attr):
            obj = self.eval(target.obj)
            for one in alternatives(obj):
                self.set_attribute(one, target.name, value, at, how)
        elif isinstance(target, ir.Subscript):
            self._store(target, value, at, how)
        elif isinstance(target, ir.Sequence):
            self._unpack(target, value, at, how)
        elif isinstance(target, ir.Star):
            self.assign(target.value, self.items("list", [value], at, exact=False), at)

    def _unpack(self, target: ir.Sequence, value: Value, at: ir.Span, how: str) -> None:
        parts = self.unpack(value, len(target.items), at)
        starred = next((index for index, item in enumerate(target.items) if isinstance(item, ir.Star)), None)
        if starred is not None and isinstance(value, Items) and value.exact:
            values = value.values
            tail = len(target.items) - starred - 1
            middle = values[starred : len(values) - tail]
            parts = [*values[:starred], self.items("list", middle, at), *values[len(values) - tail :]]
            for item, part in zip(target.items, parts, strict=False):
                self.assign(item.value if isinstance(item, ir.Star) else item, part, at, how)
            return
        for item, part in zip(target.items, parts, strict=False):
            self.assign(item, part, at, how)

    def unpack(self, value: Value, count: int, at: ir.Span) -> list[Value]:
        """The parts of `a, b = value`."""
        if isinstance(value, Choice):
            columns = [self.unpack(one, count, at) for one in value.values]
            return [join(*[column[index] for column in columns]) for index in range(count)]
        if isinstance(value, Items) and value.exact and len(value.slots) == count:
            return [self.read(value, index, one, at) for index, one in enumerate(value.values)]
        if isinstance(value, Tensor):
            return [self.tensor_element(value, const(index), at) for index in range(count)]
        if isinstance(value, Items) and value.slots:
            return [join(*value.values)] * count
        if isinstance(value, Instance) and (value.cls.fields or value.cls.dataclass):
            return [*list(value.slots.values())[:count], *([UNKNOWN] * count)][:count]
        if isinstance(value, Host) and value.kind == "size":
            return [Host("int", origins=value.origins, marks=value.marks | {"shape"})] * count
        return [UNKNOWN] * count

    def set_attribute(self, obj: Value, name: str, value: Value, at: ir.Span, how: str = "assign") -> None:
        if isinstance(obj, Instance):
            found = obj.cls.find(name + ".setter")
            if found is not None:
                self.enter(self.method_closure(*found), [obj, value], {}, at)
                return
        if isinstance(obj, Tensor):
            torchlib.set_tensor_attribute(self, obj, name, value, at)
        elif isinstance(obj, ClassValue):
            self.patched.add(name)
            self.write(self.class_holder(obj.cls), name, value, at, how)
        elif isinstance(obj, ModuleValue):
            self.write(self.module_scope(obj.module), name, value, at, how)
        elif isinstance(obj, Holder):
            torchlib.before_write(self, obj, name, value, at)
            self.write(obj, name, value, at, how)
        elif isinstance(obj, Symbol):
            torchlib.set_symbol(self, f"{obj.name}.{name}", value, at)

    def _store(self, target: ir.Subscript, value: Value, at: ir.Span, how: str) -> None:
        obj, index = self.eval(target.obj), self.eval(target.index)
        self.happen(ev.IndexEvent, target.at, obj, index, value, isinstance(target.index, (ir.Const, ir.Slice)))
        for one in alternatives(obj):
            if isinstance(one, Tensor):
                if isinstance(index, Host) and index.kind == "str":
                    continue  # a TensorDict or a batch: the entry is bound to another tensor
                whole = (isinstance(index, External) and not index.args) or (
                    isinstance(index, Host) and index.kind == "ellipsis"
                )
                self.happen(ev.InplaceEvent, at, one.storage, "[]=", value, one.part or not whole)
            elif isinstance(one, (Items, Mapping, External)):
                key = self.key(index)
                if key is NO or (isinstance(key, int) and key < 0):
                    old = one.slots.get(REST)
                    self.write(one, REST, value if old is None else join(old, value), at, how)
                    if isinstance(one, Items):
                        one.exact = False
                else:
                    self.write(one, key, value, at, how)
            elif isinstance(one, Symbol):
                torchlib.set_symbol(self, f"{one.name}[]", value, at)
            elif isinstance(one, Instance):
                found = one.cls.find("__setitem__")
                if found:
                    self.enter(self.method_closure(*found), [one, index, value], {}, at)

    def _AugAssign(self, node: ir.AugAssign) -> int:
        target = node.target
        old = self.eval(target)
        value = self.eval(node.value)
        for one in alternatives(old):
            if isinstance(one, Tensor):
                self.happen(
                    ev.InplaceEvent, node.at, one.storage, node.op + "=", value, isinstance(target, ir.Subscript)
                )
                self.happen(ev.OpEvent, node.at, node.op, (one, value), one)
                return NORMAL
        if isinstance(old, Items) and node.op == "+":
            pylib.method(self, old, "extend", [value], {}, node.at)
            return NORMAL
        self.assign(target, self.binary(node.op, old, value, node.at), node.at, "augment")
        return NORMAL

    def _Do(self, node: ir.Do) -> int:
        value = self.eval(node.value)
        if isinstance(value, External) and value.name == "torch.set_grad_enabled":  # not in a `with`: from here on
            self.grad_mode = contexts.grad_mode(value)
        return NORMAL

    def _Return(self, node: ir.Return) -> int:
        value = self.maybe(node.value)
        self.frame.returns.append(value)
        if self.captures and not self.open:
            self.happen(ev.ReturnEvent, node.at, value, self.frame.name)
        return RETURN

    def _Raise(self, node: ir.Raise) -> int:
        if node.value is not None:
            self.eval(node.value)
        return RAISE

    def _Assert(self, node: ir.Assert) -> int:
        value = self.eval(node.test)
        self.happen(ev.TestEvent, node.test.at, "assert", value)
        narrowed = self.narrow(node.test)
        for holder, key, yes, _ in narrowed:
            self.put(holder, key, yes)
        return RAISE if self.truth(value) is False and not self.doubt and not self.open else NORMAL

    def _Delete(self, node: ir.Delete) -> int:
        for target in node.targets:
            if isinstance(target, ir.Name):
                self.happen(
                    ev.WriteEvent,
                    node.at,
                    Cell(self.frame.scope, target.id),
                    self.frame.scope.slots.get(target.id),
                    NONE,
                    "del",
                )
                self.drop(self.frame.scope, target.id)
            elif isinstance(target, ir.Attr):
                for one in alternatives(self.eval(target.obj)):
                    if isinstance(one, Holder) and not isinstance(one, Scope):
                        self.happen(
                            ev.WriteEvent, node.at, Cell(one, target.name), one.slots.get(target.name), NONE, "del"
                        )
                        self.drop(one, target.name)
            elif isinstance(target, ir.Subscript):
                for one in alternatives(self.eval(target.obj)):
                    if isinstance(one, Holder):
                        pylib.remove(self, one, self.eval(target.index), node.at)
        return NORMAL

    def _Scope(self, node: ir.Scope) -> int:
        scope = self.frame.scope
        for name in node.names:
            if node.kind == "global":
                scope.redirect[name] = self.module_scope(self.frame.module)
            else:
                outer = scope.outer
                while outer is not None and outer.outer is not None and name not in outer.slots:
                    outer = outer.outer
                if outer is not None:
                    scope.redirect[name] = outer
        return NORMAL

    def _Jump(self, node: ir.Jump) -> int:
        return BREAK if node.kind == "break" else CONTINUE

    def _Define(self, node: ir.Define) -> int:
        self.put(self.frame.scope, node.func.name, self.decorate_definition(node))
        return NORMAL

    def decorate_definition(self, node: ir.Define) -> Value:
        return self.decorate(self.closure(node.func, node.at), node.func.decorators)

    def _DefineClass(self, node: ir.DefineClass) -> int:
        key = ("classinfo", id(node.cls), id(self.frame.scope) if self.frame.scope.outer is not None else 0)
        cls = self.memo.get(key)
        if cls is None:
            cls = ClassInfo(node.cls, self.frame.module, self.frame.scope)
            self.memo[key] = cls
            for base in node.cls.bases:
                self._base(cls, self.eval(base))
            for deco in node.cls.decorators:
                text = deco.func if isinstance(deco, ir.Call) else deco
                name = self.eval(text)
                if isinstance(name, Symbol) and name.name in (
                    "dataclasses.dataclass",
                    "dataclass",
                    "attrs.define",
                    "attr.s",
                ):
                    cls.dataclass = True
        value: Value = ClassValue(cls)
        hook = cls.find_after(cls, "__init_subclass__")
        if hook is not None:
            words = {
                word.name: self.eval(word.value) for word in node.cls.keywords if word.name not in (None, "metaclass")
            }
            self.enter(self.method_closure(*hook), [value], words, node.at)
        for deco in reversed(node.cls.decorators):
            func = self.eval(deco)
            if isinstance(func, (Closure, Instance)) or (isinstance(func, Bound) and isinstance(func.func, Closure)):
                made = self.call(func, [value], {}, deco.at)
                value = made if isinstance(made, ClassValue) else value
        self.put(self.frame.scope, node.cls.name, value)
        return NORMAL

    def _base(self, cls: ClassInfo, base: Value) -> None:
        for one in alternatives(base):
            if isinstance(one, ClassValue):
                cls.bases.append(one.cls)
            elif isinstance(one, Symbol):
                cls.bases.append(one.name)
            elif isinstance(one, Unknown) and one.text:
                cls.bases.append(one.text)

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
        """Whether a class has a base of the project that is told of its subclasses."""
        bases = stmt.cls.bases if isinstance(stmt, ir.DefineClass) else ()
        values = [self.eval(base) for base in bases if isinstance(base, (ir.Name, ir.Attr))]
        return any(
            isinstance(value, ClassValue) and value.cls.find("__init_subclass__") is not None for value in values
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

    # -- branches

    def _If(self, node: ir.If) -> int:
        first = len(self.events)
        test = self.eval(node.test)
        self.happen(ev.TestEvent, node.test.at, "if", test).otherwise = bool(node.orelse)
        if not (node.body or node.orelse) or (_only_raises(node.body) and not node.orelse) or _binds_once(node):
            for event in self.events[first:]:  # a check of the arguments: what is recorded is the same on either side
                if isinstance(event, ev.TestEvent):
                    event.differs = False
        known = self.truth(test)
        if known is None and self.open:
            known = self._said_by_name(node.test)
        narrowed = self.narrow(node.test)
        if known is not None:
            if known and self.open and "capturing" in self.marks(test) and _only_raises(node.body):
                self.happen(ev.RefuseEvent, node.body[-1].at)
            with self.assuming(narrowed, known, keep=True):
                return self.run_block(node.body if known else node.orelse)
        begun: list[ev.Capture] = []
        statuses = self.fork(
            self._side(node.body, narrowed, True, begun), self._side(node.orelse, narrowed, False, begun)
        )
        self.open.extend(begun[:1])
        return self._combined(statuses, narrowed)

    def _said_by_name(self, test: ir.Expr) -> bool | None:
        """What a flag says by its name where its value is not known: in a capture, what is called eager is off."""
        if isinstance(test, ir.Unary) and test.op == "not":
            inner = self._said_by_name(test.operand)
            return None if inner is None else not inner
        name = test.id if isinstance(test, ir.Name) else (test.name if isinstance(test, ir.Attr) else "")
        return False if _EAGER.search(name) else None

    def _side(
        self, body: tuple[ir.Stmt, ...], narrowed: Narrowing, truth: bool, begun: list[ev.Capture]
    ) -> Callable[[], int]:
        """One side of an `if`; a capture that it begins is put into `begun`, for the other side does not run in it."""
        depth = len(self.open)

        def run() -> int:
            with self.assuming(narrowed, truth):
                status = self.run_block(body)
            if status == NORMAL:
                begun.extend(self.open[depth:])
                del self.open[depth:]
            return status

        return run

    def _combined(self, statuses: list[int], narrowed: Narrowing) -> int:
        if NORMAL in statuses:
            if len(statuses) == 2 and statuses[0] != NORMAL:  # `if x is None: return` leaves the rest knowing better
                for holder, key, _, no in narrowed:
                    if holder.slots.get(key) is not None and isinstance(holder.slots.get(key), (Choice, Unknown)):
                        self.put(holder, key, no)
            return NORMAL
        return RETURN if RETURN in statuses else statuses[0]

    def narrow(self, test: ir.Expr) -> Narrowing:
        """What a test says of a name or attribute on either side: `x is None`, `isinstance(x, C)`,
        `torch.is_tensor(x)`, plain truth."""
        if isinstance(test, ir.Unary) and test.op == "not":
            return tuple((holder, key, no, yes) for holder, key, yes, no in self.narrow(test.operand))
        if isinstance(test, ir.Bool) and test.op == "and":
            found: list[Any] = []
            for part in test.values:
                for holder, key, yes, _ in self.narrow(part):
                    found.append((holder, key, yes, holder.slots.get(key, UNKNOWN)))
            return tuple(found)
        if isinstance(test, ir.Bool) and test.op == "or":
            found = []
            for part in test.values:
                for holder, key, _, no in self.narrow(part):
                    found.append((holder, key, holder.slots.get(key, UNKNOWN), no))
            return tuple(found)
        if isinstance(test, ir.Compare) and len(test.ops) == 1 and test.ops[0] in ("is", "is not"):
            right = test.rights[0]
            if isinstance(right, ir.Const) and right.value is None and not right.kind:
                return self._split(
                    test.left, lambda one: isinstance(one, Host) and one.kind == "none", NONE, test.ops[0] == "is"
                )
        if isinstance(test, ir.Call):
            return self._narrow_call(test)
        if isinstance(test, (ir.Name, ir.Attr)):
            return self._split(test, lambda one: self.truth(one) is not False, None, True)
        return ()

    def _narrow_call(self, test: ir.Call) -> Narrowing:
        if not test.args or not isinstance(test.func, (ir.Name, ir.Attr)):
            return ()
        name = test.func.id if isinstance(test.func, ir.Name) else test.func.name
        if name in ("is_tensor", "isinstance"):
            wanted = "Tensor" if name == "is_tensor" else self._class_text(test.args[1] if len(test.args) > 1 else None)
            return self._split(
                test.args[0], lambda one: pylib.is_instance(one, wanted), pylib.example(self, wanted, test.at), True
            )
        return ()

    def _class_text(self, node: ir.Expr | None) -> str:
        if isinstance(node, ir.Name):
            return node.id
        if isinstance(node, ir.Attr):
            return node.name
        return ""

    def _split(
        self, target: ir.Expr, belongs: Callable[[Value], Any], otherwise: Value | None, positive: bool
    ) -> Narrowing:
        """The alternatives of a name or attribute that belong to the yes and to the no side."""
        cell = self.place_of(target)
        if cell is None:
            return ()
        holder, key = cell
        value = holder.slots[key]
        yes = [one for one in alternatives(value) if belongs(one) is not False]
        no = [
            one for one in alternatives(value) if not belongs(one) or isinstance(one, Unknown) or belongs(one) is None
        ]
        left = join(*yes) if yes and not all(isinstance(one, Unknown) for one in yes) else (otherwise or value)
        right = join(*no) if no else value
        return ((holder, key, left, right) if positive else (holder, key, right, left),)

    def place_of(self, target: ir.Expr) -> tuple[Holder, Any] | None:
        if isinstance(target, ir.Name):
            scope: Scope | None = self.frame.scope.redirect.get(target.id, self.frame.scope)
            while scope is not None:
                if target.id in scope.slots:
                    return scope, target.id
                scope = scope.outer
            return None
        if isinstance(target, ir.Attr) and isinstance(target.obj, (ir.Name, ir.Attr)):
            inner = self.place_of(target.obj)
            if inner is not None:
                obj = inner[0].slots[inner[1]]
                if isinstance(obj, Instance) and target.name in obj.slots:
                    return obj, target.name
        return None

    @contextmanager
    def assuming(self, narrowed: Narrowing, truth: bool, keep: bool = False) -> Iterator[None]:
        """Walks one side of a test with what the test says; afterwards the names are as wide as before, unless
        written."""
        before = [(holder, key, holder.slots.get(key)) for holder, key, _, _ in narrowed]
        for holder, key, yes, no in narrowed:
            self.put(holder, key, yes if truth else no)
        put = [(holder.slots.get(key)) for holder, key, _, _ in narrowed]
        yield
        if not keep:
            for (holder, key, old), now in zip(before, put, strict=True):
                if holder.slots.get(key) is now and old is not None:
                    self.put(holder, key, old)

    # -- loops

    def _For(self, node: ir.For) -> int:
        source = self.eval(node.source)
        self.happen(ev.LoopEvent, node.source.at, source)
        outer = self._enter_loop()
        ended = NORMAL
        for item in self.iterate(source, node.source.at):
            self.assign(node.target, item, node.target.at, "loop")
            status = self.run_block(node.body)
            if status in (RETURN, RAISE):
                ended = status
                break
            if status == BREAK:
                break
        self._leave_loop(outer)
        if ended != NORMAL:
            return ended
        return self.run_block(node.orelse)

    def _enter_loop(self) -> int:
        outer, self.frame.loop_doubt = self.frame.loop_doubt, self.doubt
        self.frame.loops += 1
        return outer

    def _leave_loop(self, outer: int) -> None:
        self.frame.loops -= 1
        self.frame.loop_doubt = outer

    def iterate(self, value: Value, at: ir.Span) -> list[Value]:
        """The items a loop takes: all of a short known sequence, else two."""
        found: list[Value] = []
        for one in alternatives(value)[:2]:
            found.extend(pylib.iterated(self, one, at))
        return found[:MAX_ROUNDS]

    def _While(self, node: ir.While) -> int:
        rounds = 0
        outer = self._enter_loop()
        status = NORMAL
        undecided = 0
        while rounds < 24 and undecided < 2:
            rounds += 1
            first = len(self.events)
            test = self.eval(node.test)
            for event in self.events[first:]:
                if isinstance(event, ev.TestEvent) and event.frame is self.frame and event.how in ("and", "or", "not"):
                    event.how = "while"  # its parts decide about the loop, too
            self.happen(ev.TestEvent, node.test.at, "while", test)
            known = self.truth(test)
            if known is False:
                break
            if known is None or (isinstance(node.test, ir.Const) and rounds > 1):
                undecided += 1
            status = self.run_block(node.body)
            if status in (BREAK, RETURN, RAISE):
                break
        self._leave_loop(outer)
        if status in (RETURN, RAISE):
            return status
        return self.run_block(node.orelse)

    def _Match(self, node: ir.Match) -> int:
        subject = self.eval(node.subject)
        self.happen(ev.TestEvent, node.subject.at, "match", subject)
        sides: list[Callable[[], int]] = []
        for case in node.cases:

            def run(case: ir.Case = case) -> int:
                for name in case.binds:
                    self.put(self.frame.scope, name, subject if case.wild else UNKNOWN)
                if case.guard is not None:
                    self.happen(ev.TestEvent, case.guard.at, "if", self.eval(case.guard))
                return self.run_block(case.body)

            sides.append(run)
        if not any(case.wild and case.guard is None for case in node.cases):
            sides.append(lambda: NORMAL)
        statuses = self.fork(*sides)
        return NORMAL if NORMAL in statuses else (RETURN if RETURN in statuses else statuses[0])

    def _Try(self, node: ir.Try) -> int:
        opened = len(self.open)
        status = self.run_block(node.body)
        ends = [status]
        if node.handlers:
            handlers = [self._handler(handler) for handler in node.handlers]
            caught = self.fork(*handlers, lambda: NORMAL)
            if status == RAISE:
                ends = caught[:-1]
        if status == NORMAL and node.orelse:
            ends = [self.run_block(node.orelse)]
        if len(self.open) > opened and status != NORMAL:
            del self.open[opened:]
        final = self.run_block(node.final)
        if final != NORMAL:
            return final
        return NORMAL if NORMAL in ends else ends[0]

    def _handler(self, handler: ir.Handler) -> Callable[[], int]:
        def run() -> int:
            if handler.name:
                self.put(self.frame.scope, handler.name, UNKNOWN)
            # what a handler does in a capture has an error before it: nothing there is judged
            outer, self.open = self.open, []
            try:
                return self.run_block(handler.body)
            finally:
                self.open = outer

        return run

    # -- with

    def _With(self, node: ir.With) -> int:
        return self._managed(node, 0)

    def _managed(self, node: ir.With, index: int) -> int:
        if index == len(node.items):
            return self._body_of(node)
        item = node.items[index]
        manager = self.eval(item.context)
        result = [NORMAL]

        def body(entered: Value) -> None:
            if item.target is not None:
                self.assign(item.target, entered, node.at)
            result[0] = self._managed(node, index + 1)

        self.with_manager(manager, body, item.context.at, node.at)
        return result[0]

    def _body_of(self, node: ir.With) -> int:
        """The body of a `with`: a region that the finder knows is one, though its managers did not show it."""
        region = self.known_regions.get((self.frame.module.path, node.at))
        if region is None or self.open or region.kind in ("compile", "wrapper", "graphed-callable"):
            return self.run_block(node.body)
        capture = graphs.begin(self, region.kind, region.api, node.at, None, {})
        capture.mode = "?"
        status: int = graphs.in_capture(self, capture, node.at, lambda: self.run_block(node.body))
        return status

    def with_manager(self, manager: Value, body: Callable[[Value], None], at: ir.Span, whole: ir.Span) -> None:
        """Runs `body` inside a context manager: torch's own, a generator of the project, or a class with
        `__enter__`."""
        options = [
            one
            for one in alternatives(manager)
            if not (isinstance(one, External) and one.name == "contextlib.nullcontext")
        ] or list(alternatives(manager))
        manager = (
            options[0] if len(options) == 1 else next((one for one in options if contexts.captures(one)), options[0])
        )
        if isinstance(manager, Bound) and isinstance(manager.func, Closure) and manager.func.wraps == "pending":
            self._with_generator(manager, body, at)
        elif isinstance(manager, Instance) and manager.cls.find("__enter__"):
            enter, leave = self.attribute(manager, "__enter__", at), self.attribute(manager, "__exit__", at)
            body(self.call(enter, [], {}, at))
            self.call(leave, [NONE, NONE, NONE], {}, at)
        else:
            contexts.with_external(self, manager, body, at, whole)

    def _with_generator(self, manager: Bound, body: Callable[[Value], None], at: ir.Span) -> None:
        func = manager.func
        assert isinstance(func, Closure)
        args: list[Value] = func.facts["args"]
        here = self.frame
        frame = self._frame(func, args, func.facts["keywords"], at)
        done = [False]

        def on_yield(value: Value) -> None:
            if not done[0]:
                done[0] = True
                with self.entered(here):
                    body(value)

        frame.on_yield = on_yield
        with self.entered(frame):
            self.run_body(func.func)
        if not done[0]:
            body(UNKNOWN)


__all__ = ["TRUE", "Machine"]
