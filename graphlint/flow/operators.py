"""Operators, comparisons and tests: folded where the operands are known, recorded where tensors take part."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from graphlint import ir
from graphlint.flow import events as ev
from graphlint.flow.indexing import Indexing
from graphlint.flow.reading import MAX_ORIGINS, unresolved
from graphlint.flow.state import NORMAL
from graphlint.flow.values import (
    FALSE,
    NO,
    REST,
    SOMETHING,
    TRUE,
    UNKNOWN,
    Bound,
    Cell,
    Choice,
    Closure,
    Holder,
    Host,
    Instance,
    Items,
    Mapping,
    Scope,
    Symbol,
    Tensor,
    Unknown,
    Value,
    alternatives,
    join,
)

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


class Operators(Indexing):
    """`a + b`, `not a`, `a and b`, `a < b`, `a if t else b`."""

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
