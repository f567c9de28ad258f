"""Simple statements: what is bound, unpacked, written, deleted, returned, defined."""

from __future__ import annotations

from collections.abc import Sequence

from graphlint import ir
from graphlint.flow import containers, contexts, torchlib
from graphlint.flow import events as ev
from graphlint.flow.calls import Calls
from graphlint.flow.state import BREAK, CONTINUE, NORMAL, RAISE, RETURN, OutOfBudget
from graphlint.flow.values import (
    NO,
    NONE,
    REST,
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
from graphlint.link import ClassInfo


class Statements(Calls):
    """Assignments and the like. Compound statements belong to the parts built on it."""

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
        if isinstance(value, External) and len(value.facts.get("items", ())) == count:
            return list(value.facts["items"])
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
            torchlib.set_tensor_attribute(self.machine, obj, name, value, at)
        elif isinstance(obj, ClassValue):
            self.patched.add(name)
            self.write(self.class_holder(obj.cls), name, value, at, how)
        elif isinstance(obj, ModuleValue):
            self.write(self.module_scope(obj.module), name, value, at, how)
        elif isinstance(obj, Holder):
            torchlib.before_write(self.machine, obj, name, value, at)
            self.write(obj, name, value, at, how)
        elif isinstance(obj, Symbol):
            torchlib.set_symbol(self.machine, f"{obj.name}.{name}", value, at)

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
                torchlib.set_symbol(self.machine, f"{one.name}[]", value, at)
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
            containers.method(self.machine, old, "extend", [value], {}, node.at)
            return NORMAL
        new = self.binary(node.op, old, value, node.at)
        self.assign(target, new, node.at, "augment")
        place = self.place_of(target) if isinstance(new, Host) and new.kind == "int" and new.known else None
        if place is not None:
            self.grown.append(Cell(*place))
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
                        containers.remove(self.machine, one, self.eval(target.index), node.at)
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
        self._under_metaclass(node, cls, value)
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

    def _under_metaclass(self, node: ir.DefineClass, cls: ClassInfo, value: Value) -> None:
        """A metaclass of the project is told of the class: registries fill themselves so."""
        found: Value | None = next((self.eval(one.value) for one in node.cls.keywords if one.name == "metaclass"), None)
        if found is None:
            found = next((one.metaclass for one in cls.mro() if isinstance(one, ClassInfo) and one.metaclass), None)
        if not isinstance(found, ClassValue):
            return
        cls.metaclass = found
        body = Mapping(self.site(node.at), self.tick())
        for name in cls.attributes:
            slot = self.class_slot(cls, name)
            if slot is not None:
                body.slots[name] = slot
        given = [const(cls.name), self.items("tuple", [], node.at), body]
        for name in ("__new__", "__init__"):
            method = found.cls.find(name)
            if method is not None:
                self.made_class, outer = value, self.made_class
                first = found if name == "__new__" else value
                self.enter(self.method_closure(*method), [first, *given], {}, node.at)
                self.made_class = outer

    def _base(self, cls: ClassInfo, base: Value) -> None:
        for one in alternatives(base):
            if isinstance(one, ClassValue):
                cls.bases.append(one.cls)
            elif isinstance(one, Symbol):
                cls.bases.append(one.name)
            elif isinstance(one, Unknown) and one.text:
                cls.bases.append(one.text)
