"""Writes the function that a replay runs through, as Python source made for one graph.

A general wrapper flattens, compares and copies in loops: tens of microseconds. The call that a graph serves is known
at capture, so its check is spelled out: unpack these names, compare these constants, one C++ check of all tensors, one
grouped copy, a few facts, launch. The function gives `MISS` when the call is not the graph's; the slow path then finds
out why.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from graphlint.runtime.buckets import BucketPlan
from graphlint.runtime.spec import PlainSpec, Spec, TensorSpec, Tree, take_apart
from graphlint.runtime.turn import FAST_PATH
from graphlint.runtime.watch import EVERY, Watch

MISS: Any = type("Miss", (), {"__repr__": lambda self: "MISS"})()


@dataclass
class Source:
    """Lines of a function under construction and the constants they name."""

    lines: list[str] = field(default_factory=list)
    constants: dict[str, Any] = field(default_factory=dict)
    depth: int = 1
    _count: Any = field(default_factory=itertools.count)

    def add(self, line: str) -> None:
        """One line at the present depth."""
        self.lines.append("    " * self.depth + line)

    def constant(self, value: Any, name: str = "k") -> str:
        """A name for a value."""
        key = f"{name}{next(self._count)}"
        self.constants[key] = value
        return key

    def build(self) -> Callable[[Any, Any], Any]:
        """The function `call(args, kwargs)`."""
        text = "def call(args, kwargs):\n" + "\n".join(self.lines) + "\n"
        space, self.constants = self.constants, {}
        exec(compile(text, FAST_PATH, "exec"), space)
        function: Callable[[Any, Any], Any] = space.pop("call")  # in no cycle: it goes, with all it holds, when dropped
        function.__doc__ = text  # `print(guard.report().source)` shows what a replay does
        return function


def write_structure(out: Source, spec: Spec) -> list[str]:
    """Unpacks the call into one variable per leaf; gives their names. A call nested otherwise is a MISS."""
    args, kwargs = spec.tree.children
    leaves: list[str] = []
    out.add(f"if len(args) != {len(args.children)}: return MISS")
    if not kwargs.keys and all(child.kind == "leaf" for child in args.children):
        out.add("if kwargs: return MISS")
        return [f"args[{i}]" for i in range(len(args.children))]  # the tuple can then be passed on whole
    names = [f"a{i}" for i in range(len(args.children))]
    if names:
        out.add(f"({', '.join(names)},) = args")
    if kwargs.keys:
        out.add(f"if tuple(kwargs) != {kwargs.keys!r}: return MISS")
        words = [f"w{i}" for i in range(len(kwargs.keys))]
        out.add(f"({', '.join(words)},) = kwargs.values()")
        names += words
    else:
        out.add("if kwargs: return MISS")
    for name, child in zip(names, [*args.children, *kwargs.children], strict=True):
        _write_tree(out, name, child, leaves)
    return leaves


def _write_tree(out: Source, name: str, tree: Tree, leaves: list[str]) -> None:
    if tree.kind == "leaf":
        leaves.append(name)
        return
    children = [f"{name}_{i}" for i in range(len(tree.children))]
    if tree.kind == "registered":
        taker = out.constant(_registered_taker(tree), "take")
        out.add(f"{name}_t = {taker}({name})")
        out.add(f"if {name}_t is None: return MISS")
        source = f"{name}_t"
    else:
        out.add(f"if type({name}) is not {out.constant(tree.cls, 'type')}: return MISS")
        source = name
    if tree.kind == "record":
        for child, key in zip(children, tree.keys, strict=True):
            out.add(f"{child} = {name}.{key}")
    elif tree.kind == "dict":
        out.add(f"if tuple({name}) != {out.constant(tree.keys, 'keys')}: return MISS")
        if children:
            out.add(f"({', '.join(children)},) = {name}.values()")
    else:
        out.add(f"if len({source}) != {len(children)}: return MISS")
        if children:
            out.add(f"({', '.join(children)},) = {source}")
    for child, subtree in zip(children, tree.children, strict=True):
        _write_tree(out, child, subtree, leaves)


def _registered_taker(tree: Tree) -> Callable[[Any], tuple[Any, ...] | None]:
    """Takes a registered type apart; None when the class or its context differs from the captured one."""

    def take(value: Any) -> tuple[Any, ...] | None:
        if type(value) is not tree.cls:
            return None
        _, _, items = take_apart(value)
        if tuple(key for key, _ in items) != tree.keys:
            return None
        return tuple(item for _, item in items)

    return take


def write_plain(out: Source, spec: Spec, names: list[str], values: list[Any]) -> None:
    """Compares every argument that is no tensor with the captured value."""
    for leaf, name, value in zip(spec.leaves, names, values, strict=True):
        if not isinstance(leaf, PlainSpec):
            continue
        k = out.constant(value)
        if value is None or isinstance(value, bool):
            out.add(f"if {name} is not {k}: return MISS")
        elif isinstance(value, (int, float, str, bytes)):
            out.add(f"if {name} != {k} or type({name}) is not {out.constant(type(value), 'type')}: return MISS")
        else:
            out.add(f"if {name} is not {k} and {name} != {k}: return MISS")


def write_context(out: Source, spec: Spec, device_type: str, checked: bool) -> str:
    """Compares grad mode and determinism with those of the capture; gives the test for inference mode and autocast.

    `checked`: torch's C++ guards look at the tensors of every call. They see inference mode and autocast too, so
    that this test is needed only where they are skipped; else it is written here and the result is empty.
    """
    now = spec.context
    out.constants.update(
        grad_on=torch.is_grad_enabled,
        inference_on=torch.is_inference_mode_enabled,
        deterministic_on=torch._C._get_deterministic_algorithms,
        cast_on=torch.is_autocast_enabled,
        cast_to=torch.get_autocast_dtype,
    )
    out.add(f"if grad_on() is not {now.grad} or deterministic_on() is not {now.deterministic}: return MISS")
    asked = "cast_on()" if device_type == "cuda" else f"cast_on({device_type!r})"
    other = f"inference_on() is not {now.inference} or {asked} is not {now.autocast is not None}"
    if now.autocast is not None:
        other += f" or cast_to({device_type!r}) is not {out.constant(now.autocast)}"
        checked = False
    if checked:
        return other
    out.add(f"if {other}: return MISS")
    return ""


def write_training(out: Source, roots: list[torch.nn.Module], limit: int = 4) -> None:
    """Compares the training flag of the outermost modules."""
    for module in roots[:limit]:
        out.add(f"if {out.constant(module, 'module')}.training is not {module.training}: return MISS")


def tensor_check(tensors: list[torch.Tensor], spec: list[TensorSpec], dynamic: dict[int, int]) -> Callable[..., bool]:
    """One function that compares all tensors of a call with the captured ones.

    `dynamic[i]` is the dimension of tensor i that a bucket lets vary; strides of such a tensor are free. Uses torch's
    C++ guards where they exist, which also see autocast, inference tensors and the same tensor passed twice.
    """
    if not tensors:
        return lambda: True
    sizes: list[Any] = []
    strides: list[Any] = []
    for i, leaf in enumerate(spec):
        free = dynamic.get(i)
        sizes.append([None if d == free else size for d, size in enumerate(leaf.shape)])
        loose = free is not None
        strides.append([None if loose or n <= 1 else s for n, s in zip(leaf.shape, leaf.stride, strict=True)])
    try:
        from torch._C._dynamo.guards import TensorGuards

        guards = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        if guards.check(*tensors):
            check: Callable[..., bool] = guards.check
            return check
    except (ImportError, TypeError, RuntimeError):
        pass
    return python_check(spec, dynamic)


def is_native(check: Callable[..., bool]) -> bool:
    """Whether a check is torch's C++ one."""
    return not hasattr(check, "__code__")


def python_check(spec: list[TensorSpec], dynamic: dict[int, int]) -> Callable[..., bool]:
    """The same comparison in Python, for a torch without those guards."""

    def check(*tensors: Any) -> bool:
        for i, (tensor, want) in enumerate(zip(tensors, spec, strict=True)):
            if not isinstance(tensor, torch.Tensor):
                return False
            have = TensorSpec.of(tensor)
            if i in dynamic:
                free = dynamic[i]
                shape = tuple(
                    w if d == free else h for d, (h, w) in enumerate(zip(have.shape, want.shape, strict=False))
                )
                have = have._replace(shape=shape, stride=want.stride)
            if have != want:
                return False
        return True

    return check


def write_watch(out: Source, watch: Watch, broken: Callable[[Any, Any, Any], Any]) -> None:
    """Looks at the anchors and at one more fact (all of them when the watch is full). A broken fact goes to
    `broken`.
    """
    if watch.mode == "off":
        return
    out.constants.update(dirty=watch.dirty, broken=broken)
    out.add("if dirty[0]: return broken(None, args, kwargs)")
    facts = watch.anchors + (watch.facts if watch.mode == "full" else [])
    for fact in facts:
        f = out.constant(fact, "fact")
        look, key, held = (
            out.constant(fact.look, "look"),
            out.constant(fact.key, "key"),
            out.constant(fact.held, "held"),
        )
        if fact.address is int:
            out.add(f"if {look}({key}) != {held}: return broken({f}, args, kwargs)")
        else:
            address = out.constant(fact.address, "address")
            out.add(f"if {look}({key}) is not {held} or {address}() != {fact.at}: return broken({f}, args, kwargs)")
    if watch.mode == "sampled" and watch.facts:
        turns = [turn for fact in watch.facts for turn in (tuple(fact[:5]), *[None] * (EVERY - 1))]
        out.constants["next_fact"] = itertools.cycle(turns).__next__
        out.add("fact = next_fact()")
        out.add("if fact:")
        out.add("    look, key, held, address, at = fact")
        out.add("    if look(key) is not held or address() != at: return broken(None, args, kwargs)")


def write_route(out: Source, plan: BucketPlan, size: int, names: list[str], route: Callable[[int], Any]) -> None:
    """Sends a call of another bucket to that bucket's function."""
    out.constants["route"] = route
    at = plan.sizes.index(size)
    low = plan.sizes[at - 1] if at else -1
    first = True
    for i, dim in plan.dims.items():
        if first:
            out.add(f"try: n = {names[i]}.shape[{dim}]")
            out.add("except (AttributeError, IndexError): return MISS")
            out.add(f"if not {low} < n <= {size}:")
            out.add("    other = route(n)")
            out.add("    return MISS if other is None else other(args, kwargs)")
            first = False
        else:
            out.add(f"if {names[i]}.shape[{dim}] != n: return MISS")


def write_outputs(out: Source, tree: Tree, names: list[str], build: Callable[[list[Any]], Any]) -> str:
    """The expression that rebuilds the result from output variables; containers are new on each call."""
    following = iter(names).__next__

    def expression(node: Tree) -> str:
        if node.kind == "leaf":
            return following()
        parts = [expression(child) for child in node.children]
        if node.kind == "tuple" and node.cls is tuple:
            return f"({', '.join(parts)}{',' if parts else ''})"
        if node.kind == "list":
            return f"[{', '.join(parts)}]"
        if node.kind == "dict" and node.cls is dict:
            keys = [out.constant(key, "key") for key in node.keys]
            return "{" + ", ".join(f"{k}: {p}" for k, p in zip(keys, parts, strict=True)) + "}"
        raise _Unspelled

    try:
        return expression(tree)
    except _Unspelled:
        out.constants["build"] = build
        return f"build([{', '.join(names)}])"


class _Unspelled(Exception):
    """A container without a literal."""


def holders(function: Callable[..., Any], name: str) -> int:
    """What `refs(name)` gives inside a generated function while nobody else holds that object."""
    space = function.__globals__
    space.setdefault("refs", sys.getrefcount)
    exec("def _count(): return refs(" + name + ")", space)
    count: int = space.pop("_count")()
    return count
