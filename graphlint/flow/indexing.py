"""`obj[index]`: elements of containers and tensors, slices, and the dimensions that are left."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from graphlint import ir
from graphlint.flow import events as ev
from graphlint.flow.reading import Reading
from graphlint.flow.values import (
    NO,
    REST,
    UNKNOWN,
    ClassValue,
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
    Value,
    alternatives,
    join,
)


class Indexing(Reading):
    """Subscripts."""

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
