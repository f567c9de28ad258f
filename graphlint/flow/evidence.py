"""Which parameters of a function are tensors, by what the function does with them.

Code that nobody annotates still shows what it expects: a parameter with a method that only tensors have, one that is
handed to a function of torch or to a submodule, one that a
module's `forward` reduces. Where nothing of the kind stands, nothing is assumed.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from graphlint import ir
from graphlint.flow import names
from graphlint.link import Module

_ONLY = (
    names.TENSOR_ONLY
    | names.TENSOR_ONLY_ATTRIBUTES
    | frozenset({"is_contiguous", "new_zeros", "to", "cuda", "item", "permute", "transpose"})
)
_NOT_ALONE = frozenset(
    {"to", "half", "numel", "chunk", "unfold", "gather", "detach", "expand"}
)  # other classes have these too
_REDUCED = frozenset(
    {
        "sum",
        "mean",
        "max",
        "min",
        "any",
        "all",
        "argmax",
        "argmin",
        "cumsum",
        "float",
        "long",
        "int",
        "bool",
        "squeeze",
        "sort",
        "topk",
        "nonzero",
        "norm",
    }
)
_CONSTRUCTORS = frozenset({
    "torch.device", "torch.tensor", "torch.as_tensor", "torch.Size", "torch.from_numpy", "torch.full", "torch.zeros",
    "torch.ones", "torch.empty", "torch.arange", "torch.randn", "torch.rand", "torch.load", "torch.save",
    "torch.compile", "torch.manual_seed", "torch.is_tensor", "torch.Generator", "torch.linspace", "torch.eye",
})  # fmt: skip


def tensor_parameters(func: ir.Function, module: Module, forward: bool) -> frozenset[str]:
    """The parameters that must be tensors; `forward` says that the function is a module's forward, where a reduction is
    evidence too."""
    wanted = {param.name for param in func.params if param.kind in ("pos", "kw") and param.annotation is None} - {
        "self",
        "cls",
    }
    found: set[str] = set()
    if wanted:
        for node in _nodes(func.body):
            found |= _shown(node, wanted, module, forward)
    return frozenset(found)


def tensor_attributes(cls: ir.Class) -> frozenset[str]:
    """The attributes of a class that its methods use as only tensors can be used: `self.x.copy_(...)`."""
    found: set[str] = set()
    for node in _nodes(cls.body):
        if (
            isinstance(node, ir.Attr)
            and isinstance(node.obj, ir.Attr)
            and isinstance(node.obj.obj, ir.Name)
            and node.obj.obj.id == "self"
        ):
            if node.name in _ONLY and node.name not in _NOT_ALONE:
                found.add(node.obj.name)
    return frozenset(found)


def _shown(node: object, wanted: set[str], module: Module, forward: bool) -> set[str]:
    if isinstance(node, ir.Attr) and isinstance(node.obj, ir.Name) and node.obj.id in wanted:
        if (node.name in _ONLY and node.name not in _NOT_ALONE) or (forward and node.name in _REDUCED | {"shape"}):
            return {node.obj.id}
    elif isinstance(node, ir.Call) and _of_torch(node.func, module, forward):
        return (
            {arg.id for arg in node.args[:3] if isinstance(arg, ir.Name) and arg.id in wanted}
            if node.args and isinstance(node.args[0], ir.Name)
            else set()
        )
    elif isinstance(node, ir.Binary) and node.op == "@":
        return {side.id for side in (node.left, node.right) if isinstance(side, ir.Name) and side.id in wanted}
    return set()


def _of_torch(func: ir.Expr, module: Module, forward: bool) -> bool:
    """Whether it is a function of torch that takes tensors first, or a submodule of the module whose forward this
    is."""
    parts: list[str] = []
    while isinstance(func, ir.Attr):
        parts.append(func.name)
        func = func.obj
    if not isinstance(func, ir.Name) or not parts:
        return False
    if func.id == "self":
        return False
    for stmt in module.index.get(func.id, ())[:1]:
        if isinstance(stmt, ir.Import):
            whole = ".".join(filter(None, [stmt.module, stmt.symbol]))
            name = ".".join([whole, *reversed(parts)])
            return (
                name.startswith(("torch.nn.functional.", "torch."))
                and name.count(".") in (1, 3)
                and name not in _CONSTRUCTORS
                and not parts[0][:1].isupper()
            )
    return False


def _nodes(body: object) -> Iterator[object]:
    """Every node of a function's body, those of nested functions too."""
    stack = [body]
    while stack:
        node = stack.pop()
        if isinstance(node, tuple):
            stack.extend(node)
        elif isinstance(node, msgspec.Struct):
            yield node
            stack.extend(
                getattr(node, name) for name in node.__struct_fields__ if name not in ("at", "id", "name", "op")
            )
