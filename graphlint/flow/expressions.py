"""Expressions -> values. One method per expression of `ir.py`; facts that a check may want are recorded on the way."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from graphlint import ir
from graphlint.flow import events as ev
from graphlint.flow.state import NORMAL, State
from graphlint.flow.values import (
    FALSE,
    NO,
    NONE,
    REST,
    SOMETHING,
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
    Partial,
    Scope,
    Symbol,
    Tensor,
    Unknown,
    Value,
    Wrapped,
    alternatives,
    const,
    join,
)
from graphlint.regions.region import Region

_FOLD: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "//": operator.floordiv,
    "%": operator.mod,
    "<<": operator.lshift, ">>": operator.rshift, "|": operator.or_, "&": operator.and_, "^": operator.xor,
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
_DUNDERS = {
    "+": "add", "-": "sub", "*": "mul", "/": "truediv", "//": "floordiv", "%": "mod", "@": "matmul", "**": "pow", "<<": "lshift", ">>": "rshift",
    "|": "or", "&": "and", "^": "xor", "==": "eq", "!=": "ne", "<": "lt", "<=": "le", ">": "gt", ">=": "ge",
}  # fmt: skip
_COMPARISONS = frozenset({"==", "!=", "<", "<=", ">", ">="})
MAX_ORIGINS = 6


class Expressions(State):
    """Evaluates expressions. `call`, `attribute` and `run` belong to the parts built on it."""

    def call(self, func: Value, args: list[Value], keywords: dict[str, Value], at: ir.Span) -> Value:
        raise NotImplementedError

    def attribute(self, obj: Value, name: str, at: ir.Span) -> Value:
        raise NotImplementedError

    def closure(self, func: ir.Function, at: ir.Span) -> Closure:
        raise NotImplementedError

    def assign(self, target: ir.Expr, value: Value, at: ir.Span) -> None:
        raise NotImplementedError

    def global_name(self, scope: Scope, name: str) -> Value | None:
        raise NotImplementedError

    def iterate(self, value: Value, at: ir.Span) -> list[Value]:
        raise NotImplementedError

    # -- dispatch

    def eval(self, node: ir.Expr) -> Value:
        made: Value = getattr(self, "_" + type(node).__name__)(node)
        return made

    def maybe(self, node: ir.Expr | None) -> Value:
        return NONE if node is None else self.eval(node)

    # -- names

    def _Name(self, node: ir.Name) -> Value:
        scope: Scope | None = self.frame.scope
        name = node.id
        if scope is not None and name in scope.redirect:
            scope = scope.redirect[name]
        while scope is not None:
            value = scope.slots.get(name)
            if value is not None:
                return self.read(scope, name, value, node.at)
            if scope.outer is None:
                break
            scope = scope.outer
        found = self.global_name(scope, name) if scope is not None else None
        if found is not None and scope is not None:
            return self.read(scope, name, found, node.at)
        return Symbol(f"builtins.{name}") if name in BUILTINS else Unknown(name)

    def read(self, holder: Holder, key: Any, value: Value, at: ir.Span) -> Value:
        """A value read from a cell: remembers the cell in host values, and tells the checks when a capture reads it."""
        capture = self.open[-1] if self.open else None
        if (
            capture is not None
            and holder.born < capture.begin
            and (
                isinstance(value, (Host, Tensor, Choice))
                or (isinstance(value, Unknown) and holder is capture.frame.scope)
            )
        ):
            self.happen(ev.ReadEvent, at, Cell(holder, key), value)
        elif capture is None and self.written_in_capture:
            cell = Cell(holder, key)
            if cell in self.written_in_capture:
                self.happen(ev.ReadEvent, at, cell, value)
        lasting = (
            not isinstance(holder, Scope)
            or holder.outer is None
            or (capture is not None and holder.born < capture.begin)
        )
        if lasting:
            return self._tag(value, Cell(holder, key))
        return value

    def _tag(self, value: Value, cell: Cell) -> Value:
        if isinstance(value, Host):
            if value.kind in ("device", "dtype") or len(value.origins) >= MAX_ORIGINS:
                return value
            return replace(value, origins=value.origins | {cell})
        if isinstance(value, Choice) and any(isinstance(one, Host) for one in value.values):
            return Choice(tuple(self._tag(one, cell) for one in value.values))
        return value

    def _Const(self, node: ir.Const) -> Value:
        if node.kind:
            return Host(node.kind)
        return const(node.value)

    # -- attributes, calls

    def _Attr(self, node: ir.Attr) -> Value:
        obj = self.eval(node.obj)
        return self.attribute(obj, node.name, node.at)

    def _Call(self, node: ir.Call) -> Value:
        func = self.eval(node.func)
        args: list[Value] = []
        keywords: dict[str, Value] = {}
        for arg in node.args:
            if isinstance(arg, ir.Star):
                spread = self.eval(arg.value)
                if isinstance(spread, Items) and spread.exact:
                    args.extend(self.read(spread, index, one, arg.at) for index, one in enumerate(spread.values))
                else:
                    args.append(Bound(spread, "*"))
            else:
                args.append(self.eval(arg))
        for word in node.keywords:
            value = self.eval(word.value)
            if word.name is not None:
                keywords[word.name] = value
            elif isinstance(value, Mapping):
                for key, one in list(value.slots.items()):
                    if key != REST:
                        keywords[str(key)] = self.read(value, key, one, word.value.at)
                if REST in value.slots:
                    keywords["**"] = value
            else:
                keywords["**"] = value
        result = self.call(func, args, keywords, node.at)
        if self.known_regions and not self.open:
            region = self.known_regions.get((self.frame.module.path, node.at))
            if region is not None and region.callables:
                self.capture_callables(region, node.at)
        return result

    def capture_callables(self, region: Region, at: ir.Span) -> None:
        """A wrapper that captures what it is given, where the walk itself did not see it capture."""
        raise NotImplementedError

    # -- indexing

    def _Subscript(self, node: ir.Subscript) -> Value:
        obj = self.eval(node.obj)
        index = self.eval(node.index)
        return self.subscript(obj, index, node)

    def subscript(self, obj: Value, index: Value, node: ir.Subscript) -> Value:
        self.happen(ev.IndexEvent, node.at, obj, index, None, isinstance(node.index, (ir.Const, ir.Slice)))
        return join(*[self._element(one, index, node) for one in alternatives(obj)])

    def _element(self, obj: Value, index: Value, node: ir.Subscript) -> Value:
        if isinstance(obj, Tensor):
            return self.tensor_element(obj, index, node.at)
        if isinstance(obj, (Items, Mapping)):
            return self._slot(obj, index, node)
        if isinstance(obj, Instance):
            found = obj.cls.find("__getitem__")
            if found:
                return self.call(self.attribute(obj, "__getitem__", node.at), [index], {}, node.at)
            if obj.cls.is_a("torch.nn.ModuleList", "torch.nn.Sequential", "torch.nn.ModuleDict"):
                return self._slot(obj, index, node)
        if isinstance(obj, External):
            return self._slot(obj, index, node)
        if isinstance(obj, Host) and obj.kind in ("str", "size", "ndarray"):
            return Host("int" if obj.kind == "size" else "any", origins=obj.origins, marks=obj.marks)
        if isinstance(obj, ClassValue):
            found = obj.cls.find("__class_getitem__")
            if found:
                return self.call(self.attribute(obj, "__class_getitem__", node.at), [obj, index], {}, node.at)
            return obj  # a generic alias
        if isinstance(obj, Scope) and obj.module is not None:  # `globals()[name]`
            key = self.key(index)
            return self.attribute(ModuleValue(obj.module), key, node.at) if isinstance(key, str) else UNKNOWN
        if isinstance(obj, Symbol):
            return obj if obj.name[:1].isupper() or "." in obj.name else UNKNOWN
        return UNKNOWN

    def _slot(self, obj: Holder, index: Value, node: ir.Subscript) -> Value:
        slots = obj.slots
        if isinstance(obj, Items) and isinstance(node.index, ir.Slice):
            return self._sliced(obj, node.index, node.at)
        if isinstance(obj, (External, Instance)) and isinstance(node.index, ir.Slice):
            numbered = [value for key, value in slots.items() if isinstance(key, int)]
            return self._sliced(self.items("list", numbered, node.at), node.index, node.at) if numbered else UNKNOWN
        key = self.key(index)
        if key is not NO:
            if isinstance(obj, Items) and isinstance(key, int) and key < 0 and obj.exact:
                key += len(slots)
            value = slots.get(key)
            if value is not None:
                return self.read(obj, key, value, node.at)
            if isinstance(obj, Mapping) and obj.factory is not None:
                made = self.call(obj.factory, [], {}, node.at)
                self.put(obj, key, made)
                return made
            if isinstance(obj, Mapping) and REST in slots:
                return self.read(obj, REST, slots[REST], node.at)
            return slots.get(REST, UNKNOWN)
        values = (
            list(slots.values())
            if not isinstance(obj, External)
            else [v for k, v in slots.items() if isinstance(k, int)]
        )
        if isinstance(obj, Mapping) and obj.factory is not None:
            values.append(self.call(obj.factory, [], {}, node.at))
        if not values:
            return UNKNOWN
        # one of its elements: a holder stands for all of them, so that what is done to it shows
        return self.read(obj, REST, join(*values[-3:]), node.at)

    def _sliced(self, obj: Items, part: ir.Slice, at: ir.Span) -> Value:
        low, high = self.maybe(part.low), self.maybe(part.high)
        if obj.exact and part.step is None and all(isinstance(one, Host) and one.known for one in (low, high)):
            try:
                return self.items(obj.kind, obj.values[low.value : high.value], at)  # type: ignore[attr-defined]
            except TypeError:
                pass
        return (
            self.items(obj.kind, obj.values, at, exact=False)
            if obj.slots
            else self.items(obj.kind, [UNKNOWN], at, exact=False)
        )

    def key(self, index: Value) -> Any:
        """The constant an index stands for, or NO."""
        if isinstance(index, Host) and index.known:
            try:
                hash(index.value)
            except TypeError:
                return NO
            return index.value
        if isinstance(index, Items) and index.kind == "tuple" and index.exact:
            parts = tuple(self.key(one) for one in index.values)
            return NO if any(part is NO for part in parts) else parts
        return NO

    def tensor_element(self, obj: Tensor, index: Value, at: ir.Span) -> Value:
        """`tensor[index]`: a view for numbers and slices, a copy for tensors and lists."""
        parts = index.values if isinstance(index, Items) and index.kind == "tuple" else [index]
        if any(isinstance(part, Tensor) and part.rank != 0 for part in parts) or any(
            isinstance(part, Items) for part in parts
        ):
            return self.tensor(at, obj.device, obj.dtype, None, grad=obj.grad)
        rank = obj.rank
        if rank is not None:
            for part in parts:
                if isinstance(part, Host) and part.kind == "none":
                    rank += 1
                elif (isinstance(part, Host) and part.kind in ("int", "any")) or isinstance(part, Tensor):
                    rank -= 1
        whole = all(_takes_all(part, obj) for part in parts)
        return replace(
            obj,
            rank=rank if rank is None or rank >= 0 else None,
            dims=_dims_of(obj, parts),
            part=obj.part or not whole,
        )

    def _Slice(self, node: ir.Slice) -> Value:
        parts = [self.eval(part) for part in (node.low, node.high, node.step) if part is not None]
        made = External("slice", self.site(node.at), self.clock)
        made.args = tuple(parts)
        given = iter(parts)
        made.facts["bounds"] = tuple(None if part is None else next(given) for part in (node.low, node.high, node.step))
        return made

    # -- operators

    def _Binary(self, node: ir.Binary) -> Value:
        left, right = self.eval(node.left), self.eval(node.right)
        return self.binary(node.op, left, right, node.at)

    def binary(self, op: str, left: Value, right: Value, at: ir.Span) -> Value:
        pairs = [(a, b) for a in alternatives(left) for b in alternatives(right)][:4]
        return join(*[self._operate(op, a, b, at) for a, b in pairs])

    def _operate(self, op: str, left: Value, right: Value, at: ir.Span) -> Value:
        if isinstance(left, Tensor) or isinstance(right, Tensor):
            result = self.elementwise((left, right), at, "bool" if op in _COMPARISONS else "", op)
            self.happen(ev.OpEvent, at, op, (left, right), result)
            return result
        if isinstance(left, Host) and isinstance(right, Host):
            return self._arithmetic(op, left, right)
        if (
            self.open
            and op not in _COMPARISONS
            and unresolved(left) != unresolved(right)
            and isinstance(left if unresolved(right) else right, Host)
        ):
            # in a region, what is unknown and takes a number is a tensor or leads to one: the number is frozen either
            # way
            result = self.tensor(at, sure=False)
            self.happen(ev.OpEvent, at, op, (left, right), result)
            return result
        if isinstance(left, Items) and isinstance(right, Items) and op == "+" and left.exact and right.exact:
            return self.items(left.kind, left.values + right.values, at)
        if isinstance(left, Mapping) and isinstance(right, Mapping) and op == "|":
            union = Mapping(self.site(at), self.tick())
            union.slots.update({**left.slots, **right.slots})
            return union
        if isinstance(left, Items) and op in ("+", "*"):
            return self.items(
                left.kind,
                [*left.values, *(right.values if isinstance(right, Items) else [])] or [UNKNOWN],
                at,
                exact=False,
            )
        for one, other, prefix in ((left, right, ""), (right, left, "r")):
            method = f"__{prefix}{_DUNDERS.get(op, '')}__"
            if isinstance(one, Instance) and one.cls.find(method):
                return self.call(self.attribute(one, method, at), [other], {}, at)
        if (
            op in ("==", "!=", "<", "<=", ">", ">=")
            and not isinstance(left, Unknown)
            and not isinstance(right, Unknown)
        ):
            return Host("bool")
        return SOMETHING

    def elementwise(self, operands: tuple[Value, ...], at: ir.Span, dtype: str = "", op: str = "") -> Tensor:
        """The tensor that an element-by-element operator makes of its operands."""
        tensors = [one for one in operands if isinstance(one, Tensor)]
        devices = {one.device for one in tensors if not (one.rank == 0 and one.on_host)}
        device = "cuda" if "cuda" in devices else (tensors[0].device if len(devices) <= 1 else "?")
        if len(devices) == 1:
            device = devices.pop()
        if device == "pinned":
            device = "cpu"
        ranks = [one.rank for one in tensors]
        rank = None if None in ranks or op == "@" else max([r for r in ranks if r is not None], default=None)
        kinds = {one.dtype for one in tensors}
        folded = frozenset(cell for one in operands if isinstance(one, Tensor) and one.on_host for cell in one.scale)
        if device == "cpu" and rank == 0:
            folded |= frozenset(cell for one in operands if isinstance(one, Host) for cell in one.origins)
        return self.tensor(
            at, device, dtype or (kinds.pop() if len(kinds) == 1 and op != "/" else "?"), rank, grad=any(one.grad for one in tensors),
            sure=any(one.sure for one in tensors), scale=folded,
        )  # fmt: skip

    def _arithmetic(self, op: str, left: Host, right: Host) -> Host:
        origins = left.origins | right.origins
        if len(origins) > MAX_ORIGINS:
            origins = left.origins
        marks = left.marks | right.marks
        if "shape" in marks and op not in _COMPARISONS:
            marks |= {"computed"}
        if left.known and right.known and op in _FOLD:
            try:
                value = _FOLD[op](left.value, right.value)
                if isinstance(value, (int, float, bool)) or (isinstance(value, str) and len(value) < 200):
                    return Host(type(value).__name__, value, origins, marks)
            except Exception:  # a constant expression that Python would refuse as well
                pass
        if (
            left.known
            and right.known
            and op == "**"
            and all(isinstance(one.value, (int, float)) and abs(one.value) < 64 for one in (left, right))
        ):
            try:
                value = left.value**right.value
                if isinstance(value, (int, float)):
                    return Host(type(value).__name__, value, origins, marks)
            except Exception:
                pass
        if op in _COMPARISONS:
            return Host("bool", origins=origins, marks=marks)
        kind = left.kind if left.kind == right.kind else ("float" if "float" in (left.kind, right.kind) else "any")
        return Host("float" if op == "/" else kind, origins=origins, marks=marks)

    def _Unary(self, node: ir.Unary) -> Value:
        operand = self.eval(node.operand)
        if node.op == "not":
            self.happen(ev.TestEvent, node.at, "not", operand)
            known = self.truth(operand)
            if known is None:
                return Host("bool", origins=self.origins(operand), marks=self.marks(operand))
            return Host("bool", not known, self.origins(operand), self.marks(operand))
        if isinstance(operand, Tensor):
            result = self.elementwise((operand,), node.at)
            self.happen(ev.OpEvent, node.at, node.op, (operand,), result)
            return result
        if isinstance(operand, Host):
            if operand.known and isinstance(operand.value, (int, float)) and node.op == "-":
                return replace(operand, value=-operand.value)
            return replace(operand, value=NO)
        return UNKNOWN

    def origins(self, value: Value) -> frozenset[Cell]:
        """The cells that the host values in it were read from."""
        found: frozenset[Cell] = frozenset()
        for one in alternatives(value):
            if isinstance(one, Host):
                found |= one.origins
        return found

    def marks(self, value: Value) -> frozenset[str]:
        found: frozenset[str] = frozenset()
        for one in alternatives(value):
            if isinstance(one, Host):
                found |= one.marks
        return found

    def _Bool(self, node: ir.Bool) -> Value:
        results: list[Value] = []
        for index, part in enumerate(node.values):
            value = self.eval(part)
            last = index == len(node.values) - 1
            if not last:
                self.happen(ev.TestEvent, part.at, node.op, value)
            known = self.truth(value)
            if known is False and node.op == "and" and isinstance(value, Host) and value.kind == "bool":
                return Host("bool", False, value.origins, value.marks)  # whatever the parts before it are
            if known is (node.op == "or") and not (last and results):
                results.append(value)
                break
            if known is None or last:
                results.append(value)
        if len(results) > 1 and all(isinstance(one, Host) for one in results):
            hosts = [one for one in results if isinstance(one, Host)]
            return Host("any" if len({one.kind for one in hosts}) > 1 else hosts[0].kind,
                        origins=frozenset().union(*[one.origins for one in hosts]), marks=frozenset().union(*[one.marks for one in hosts]))  # fmt: skip
        return join(*results)

    def _Compare(self, node: ir.Compare) -> Value:
        left = self.eval(node.left)
        rights = [self.eval(right) for right in node.rights]
        if len(rights) > 1 and any(isinstance(one, Tensor) for one in (left, *rights)):
            self.happen(ev.CompareEvent, node.at, "chain", (left, *rights))
        results: list[Value] = []
        for op, right in zip(node.ops, rights, strict=True):
            results.append(self.compare(op, left, right, node.at))
            left = right
        if len(results) == 1:
            return self._asked_for_none(node, results[0])
        if all(self.truth(one) is True for one in results):
            return TRUE
        if any(self.truth(one) is False for one in results):
            return FALSE
        return Host("bool", origins=frozenset().union(*[self.origins(one) for one in results]))

    def _asked_for_none(self, node: ir.Compare, result: Value) -> Value:
        """`x is None`: the answer depends on the cell of `x`, whatever stands in it."""
        right = node.rights[0]
        if (
            node.ops[0] not in ("is", "is not")
            or not (isinstance(right, ir.Const) and right.value is None and not right.kind)
            or not isinstance(result, Host)
        ):
            return result
        found = self.place_of(node.left)
        if found is None or (isinstance(found[0], Scope) and found[0].outer is not None):
            return result
        return replace(result, origins=result.origins | {Cell(*found)}, marks=result.marks | {"none"})

    def place_of(self, target: ir.Expr) -> tuple[Holder, Any] | None:
        """The holder and key that a name or attribute stands for, where that is known."""
        raise NotImplementedError

    def compare(self, op: str, left: Value, right: Value, at: ir.Span) -> Value:
        if op in ("in", "not in"):
            return self._contains(op, left, right, at)
        if op in ("is", "is not"):
            same = self._identical(left, right)
            origins = self.origins(left) | self.origins(right)
            marks = self.marks(left) & {"env"}
            return (
                Host("bool", origins=origins, marks=marks)
                if same is None
                else Host("bool", same == (op == "is"), origins, marks)
            )
        if (
            isinstance(left, (Host, Choice))
            and isinstance(right, (Host, Choice))
            and not any(isinstance(one, Tensor) for one in (*alternatives(left), *alternatives(right)))
        ):
            lefts, rights = alternatives(left), alternatives(right)
            if len(lefts) * len(rights) > 1:
                return join(*[self.binary(op, a, b, at) for a in lefts for b in rights])
        return self.binary(op, left, right, at)

    def _contains(self, op: str, left: Value, right: Value, at: ir.Span) -> Value:
        if any(isinstance(one, Tensor) for one in (left, *alternatives(right))) or (
            isinstance(right, Items) and any(isinstance(one, Tensor) for one in right.values)
        ):
            self.happen(ev.CompareEvent, at, op, (left, right))
            return Host("bool", marks=frozenset({"data"}))
        if isinstance(right, (Mapping, Items)):
            key = self.key(left)
            members = list(right.slots) if isinstance(right, Mapping) else [self.key(one) for one in right.values]
            if not members:
                return Host("bool", op == "not in")
            if (
                key is not NO
                and REST not in members
                and NO not in members
                and (isinstance(right, Mapping) or right.exact)
            ):
                return Host("bool", (key in members) == (op == "in"), self.origins(left), self.marks(left))
        if isinstance(left, Host) and isinstance(right, Host) and left.kind == right.kind == "str":
            if left.known and right.known:
                return Host("bool", (left.value in right.value) == (op == "in"), self.origins(left), self.marks(left))
        return Host("bool", origins=self.origins(left), marks=self.marks(left))

    def _identical(self, left: Value, right: Value) -> bool | None:
        answers = {self._one_identical(a, b) for a in alternatives(left) for b in alternatives(right)}
        return answers.pop() if len(answers) == 1 else None

    def _one_identical(self, left: Value, right: Value) -> bool | None:
        for one, other in ((left, right), (right, left)):
            if isinstance(other, Host) and other.kind == "none":
                if isinstance(one, Host):
                    return one.kind == "none" if one.kind != "any" or one.known else None
                if isinstance(one, Unknown) and one.some:
                    return False
                if isinstance(one, (Unknown, Bound)) and not (isinstance(one, Bound) and isinstance(one.func, Closure)):
                    return None
                if isinstance(one, Symbol):
                    return None
                return False
        if isinstance(left, Host) and isinstance(right, Host) and left.known and right.known:
            return bool(left.value is right.value or (left.kind == right.kind and left.value == right.value))
        if isinstance(left, Holder) and isinstance(right, Holder):
            return left is right
        return None

    def _IfElse(self, node: ir.IfElse) -> Value:
        test = self.eval(node.test)
        self.happen(ev.TestEvent, node.test.at, "ternary", test)
        known = self.truth(test)
        narrowed = self.narrow(node.test)
        if known is not None:
            with self.assuming(narrowed, known):
                return self.eval(node.body if known else node.orelse)
        found: list[Value] = []

        def branch(side: ir.Expr, truth: bool) -> Callable[[], int]:
            def run() -> int:
                with self.assuming(narrowed, truth):
                    found.append(self.eval(side))
                return NORMAL

            return run

        self.fork(branch(node.body, True), branch(node.orelse, False))
        return join(*found)

    def narrow(self, test: ir.Expr) -> Any:
        raise NotImplementedError

    def assuming(self, narrowed: Any, truth: bool) -> Any:
        raise NotImplementedError

    # -- displays

    def _Sequence(self, node: ir.Sequence) -> Value:
        values: list[Value] = []
        exact = True
        for item in node.items:
            if isinstance(item, ir.Star):
                spread = self.eval(item.value)
                if isinstance(spread, Items) and spread.exact:
                    values.extend(spread.values)
                else:
                    exact = False
                    values.extend(spread.values if isinstance(spread, Items) else [UNKNOWN])
            else:
                values.append(self.eval(item))
        return self.items(node.kind, values, node.at, exact)

    def _DictDisplay(self, node: ir.DictDisplay) -> Value:
        made = Mapping(self.site(node.at), self.tick())
        made.made_in = self.capture
        for key, value in zip(node.keys, node.values, strict=True):
            item = self.eval(value)
            if key is None:
                if isinstance(item, Mapping):
                    made.slots.update(item.slots)
                else:
                    made.slots[REST] = UNKNOWN
                continue
            name = self.key(self.eval(key))
            if name is NO:
                made.slots[REST] = join(made.slots[REST], item) if REST in made.slots else item
            else:
                made.slots[name] = item
        return made

    def _Comprehension(self, node: ir.Comprehension) -> Value:
        values: list[Value] = []
        keys: list[Value] = []
        exact = self._rounds(node, 0, values, keys)
        if node.kind == "dict":
            mapping = Mapping(self.site(node.at), self.tick())
            for key, value in zip(keys, values, strict=True):
                name = self.key(key)
                mapping.slots[REST if name is NO or not exact else name] = value
            return mapping
        if not values:
            return self.items("list", [], node.at)
        made = self.items("set" if node.kind == "set" else "list", values, node.at, exact)
        if self.captures and not self.open and any(isinstance(one, Tensor) for one in values):
            self.happen(ev.MutateEvent, node.item.at, made, "collect", tuple(values))
        return made

    def _rounds(self, node: ir.Comprehension, level: int, values: list[Value], keys: list[Value]) -> bool:
        """Runs the loops of a comprehension from `level` inwards; whether the result's length is known."""
        if level == len(node.loops):
            if node.kind == "dict":
                keys.append(self.eval(node.item))
                values.append(self.eval(node.value) if node.value is not None else UNKNOWN)
            else:
                values.append(self.eval(node.item))
            return True
        loop = node.loops[level]
        source = self.eval(loop.source)
        self.happen(ev.LoopEvent, loop.source.at, source)
        items = self.iterate(source, loop.source.at)
        exact = (isinstance(source, Items) and source.exact) or self.counted(source, len(items))
        self.frame.loops += 1
        for item in items:
            self.assign(loop.target, item, loop.target.at)
            wanted: bool | None = True
            for condition in loop.conditions:
                value = self.eval(condition)
                self.happen(ev.TestEvent, condition.at, "comprehension", value)
                known = self.truth(value)
                wanted = False if known is False else (None if known is None else wanted)
                if wanted is False:
                    break
            if wanted is None:
                exact = False
            if wanted is not False:
                exact = self._rounds(node, level + 1, values, keys) and exact
        self.frame.loops -= 1
        return exact

    @staticmethod
    def counted(source: Value, taken: int) -> bool:
        """Whether `source` is a `range` of which all `taken` numbers were walked."""
        if not (
            isinstance(source, External)
            and source.name == "range"
            and all(isinstance(one, Host) and isinstance(one.value, int) for one in source.args)
        ):
            return False
        try:
            return len(range(*[one.value for one in source.args])) == taken  # type: ignore[attr-defined]
        except (TypeError, ValueError, OverflowError):
            return False

    def _Format(self, node: ir.Format) -> Value:
        parts: list[str] = list(node.texts[:1])
        for part, text in zip(node.values, node.texts[1:] or [""] * len(node.values), strict=True):
            value = self.eval(part)
            self.happen(ev.FormatEvent, part.at, value)
            if isinstance(value, Host) and value.known and value.kind in ("str", "int", "bool"):
                parts += [str(value.value), text]
            else:
                parts = []
        whole = len(parts) == 2 * len(node.values) + 1 and sum(map(len, parts)) < 200
        return const("".join(parts)) if whole else Host("str")

    def _Star(self, node: ir.Star) -> Value:
        return self.eval(node.value)

    def _Await(self, node: ir.Await) -> Value:
        return self.eval(node.value)

    def _Lambda(self, node: ir.Lambda) -> Value:
        return self.closure(node.func, node.at)

    def _Walrus(self, node: ir.Walrus) -> Value:
        value = self.eval(node.value)
        self.assign(node.target, value, node.at)
        return value

    def _Yield(self, node: ir.Yield) -> Value:
        value = self.maybe(node.value)
        frame = self.frame
        if node.spread:
            frame.yields.extend(self.iterate(value, node.at))
            return UNKNOWN
        if callable(frame.on_yield):
            frame.on_yield(value)
        else:
            frame.yields.append(value)
        return UNKNOWN


def _same_each_time(bound: Value) -> bool:
    return isinstance(bound, Host) and (bound.known or bound.kind == "none") and not bound.origins and not bound.marks


def _dims_of(obj: Tensor, parts: list[Value]) -> tuple[int | None, ...] | None:
    """The dimensions of `obj[parts]`, for numbers and slices."""
    left = list(obj.dims if obj.dims is not None else [None] * (obj.rank or 0))
    if not left:
        return None
    found: list[int | None] = []
    for part in parts:
        if isinstance(part, Host) and part.kind == "none":
            found.append(1)
        elif not left:
            return None
        elif isinstance(part, External) and part.name == "slice":
            found.append(_length(part.facts.get("bounds", ()), left.pop(0)))
        elif isinstance(part, Host) and part.kind == "int":
            left.pop(0)
        else:
            return None
    return (*found, *left)


def _length(bounds: tuple[Value | None, ...], whole: int | None) -> int | None:
    """How much of `whole` a slice takes."""
    numbers: list[Any] = [one.value if isinstance(one, Host) and isinstance(one.value, int) else one for one in bounds]
    if whole is not None and all(one is None or isinstance(one, int) for one in numbers):
        try:
            return len(range(whole)[slice(*numbers)])
        except ValueError:
            return None
    low, high, step = numbers if len(numbers) == 3 else (UNKNOWN, UNKNOWN, UNKNOWN)
    if step is None and low in (None, 0) and isinstance(high, int) and high >= 0:
        return high
    return None


def _takes_all(part: Value, obj: Tensor) -> bool:
    """Whether an index takes the same part each time: `:`, `1:`, `...`, `None`, `:n` up to the whole length."""
    if isinstance(part, External) and part.name == "slice":
        if all(_same_each_time(one) for one in part.args):
            return True
        last, length = part.args[-1], obj.dims[0] if obj.dims else None
        return (
            len(part.args) == 1
            and length is not None
            and isinstance(last, Host)
            and isinstance(last.value, int)
            and last.value >= length
        )
    return isinstance(part, Host) and part.kind in ("none", "ellipsis")


def unresolved(value: Value) -> bool:
    """Whether nothing is known of it."""
    return isinstance(value, Unknown) or (isinstance(value, Bound) and isinstance(value.receiver, Unknown))


BUILTINS = frozenset(dir(__import__("builtins")))

__all__ = ["BUILTINS", "Expressions", "ModuleValue", "Partial", "Wrapped"]
