"""The one place that decides what "the same call" means.

A graph replays one call: this structure of arguments, these shapes, strides, dtypes and devices, these plain values,
this grad mode. `Spec.of` reads all of it from a call into a frozen, hashable value; two calls with equal specs can
share a graph. Slow (tens of microseconds): it runs when a graph is looked up for the first time, `hotpath.py`
generates the fast check from it.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from graphlint.runtime.errors import SignatureError


class TensorSpec(NamedTuple):
    """What a graph froze about one tensor argument; strides count elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """The spec of a strided tensor on any device. The stride of a dimension of size 1 means nothing and is given
        as 0.
        """
        stride = tuple(0 if size <= 1 else step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        return cls(tuple(tensor.shape), stride, tensor.dtype, tensor.device, tensor.requires_grad)

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"{name}[{', '.join(map(str, self.shape))}] on {self.device}"


class PlainSpec(NamedTuple):
    """A non-tensor argument: its type and a hashable stand-in for its value (`1`, `True`, `1.0` are three values)."""

    kind: type
    value: object

    def __str__(self) -> str:
        return repr(self.value)


class Tree(NamedTuple):
    """The shape of nested containers; `keys` name the children.

    `kind` is "leaf", "tuple", "list", "dict", "record" (a dataclass), "registered" (with torch's pytree) or "call".
    """

    kind: str
    cls: type | None = None
    keys: tuple[Any, ...] = ()
    children: tuple[Any, ...] = ()

    @property
    def leaf_count(self) -> int:
        """How many leaves the tree has."""
        return 1 if self.kind == "leaf" else sum(child.leaf_count for child in self.children)


LEAF = Tree("leaf")


class Context(NamedTuple):
    """Global switches that choose other kernels or another autograd graph; part of the key."""

    grad: bool
    inference: bool
    autocast: object
    deterministic: bool

    @classmethod
    def now(cls, device_type: str = "cuda") -> Context:
        """The switches of the calling thread; `device_type` as in `torch.autocast`."""
        cast = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            cast,
            torch.are_deterministic_algorithms_enabled(),
        )


class Spec(NamedTuple):
    """A call, without its data. Hashable; equal specs can share a graph.

    `aliases[i]` is the index of the first leaf that is the same tensor as leaf i (itself when there is none).
    """

    tree: Tree
    leaves: tuple[TensorSpec | PlainSpec, ...]
    names: tuple[str, ...]
    aliases: tuple[int, ...]
    context: Context

    @classmethod
    def of(
        cls,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        parameters: Sequence[str] = (),
        device_type: str = "cuda",
    ) -> Spec:
        """Reads a call. `parameters` name the positional arguments in messages.

        Raises:
            SignatureError: an argument is neither a strided tensor nor hashable; the message names it.
        """
        leaves, tree, names = flatten_call(args, kwargs, parameters)
        specs = tuple(leaf_spec(leaf, name) for leaf, name in zip(leaves, names, strict=True))
        return cls(tree, specs, names, alias_pattern(leaves), Context.now(device_type))

    @property
    def tensor_indices(self) -> tuple[int, ...]:
        """Which leaves are tensors."""
        return tuple(i for i, leaf in enumerate(self.leaves) if isinstance(leaf, TensorSpec))

    def difference(self, other: Spec) -> str:
        """One sentence: the first thing in which `other` differs from this spec; empty when they are equal."""
        if self.tree != other.tree:
            return f"the arguments are nested otherwise: {', '.join(self.names)} before, {', '.join(other.names)} now"
        for name, old, new in zip(self.names, self.leaves, other.leaves, strict=True):
            if old != new:
                return f"`{name}` was {old}, it is {new}"
        if self.aliases != other.aliases:
            return "other arguments are the same tensor"
        for field, was, now in zip(Context._fields, self.context, other.context, strict=True):
            if was != now:
                return f"{field} was {was}, it is {now}"
        return ""


def flatten_call(
    args: Sequence[Any], kwargs: Mapping[str, Any], parameters: Sequence[str] = ()
) -> tuple[list[Any], Tree, tuple[str, ...]]:
    """A call -> its leaves, its tree, and a readable path for every leaf (`batch['ids'][0]`)."""
    leaves: list[Any] = []
    names: list[str] = []
    trees = []
    for i, arg in enumerate(args):
        name = parameters[i] if i < len(parameters) else f"args[{i}]"
        trees.append(_walk(arg, name, leaves, names))
    keys = tuple(kwargs)
    kwtrees = tuple(_walk(kwargs[key], key, leaves, names) for key in keys)
    tree = Tree("call", None, keys, (Tree("tuple", tuple, (), tuple(trees)), Tree("dict", dict, keys, kwtrees)))
    return leaves, tree, tuple(names)


def flatten(value: Any, name: str = "output") -> tuple[list[Any], Tree, tuple[str, ...]]:
    """Any nested value -> leaves, tree, names; `unflatten` is its inverse."""
    leaves: list[Any] = []
    names: list[str] = []
    tree = _walk(value, name, leaves, names)
    return leaves, tree, tuple(names)


def unflatten(tree: Tree, leaves: Sequence[Any]) -> Any:
    """Rebuilds the value that `flatten` took apart, with other leaves."""
    return _build(tree, iter(leaves).__next__)


def unflatten_call(tree: Tree, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Rebuilds `(args, kwargs)` of `flatten_call`."""
    following = iter(leaves).__next__
    args = _build(tree.children[0], following)
    return args, _build(tree.children[1], following)


def leaf_spec(leaf: Any, name: str) -> TensorSpec | PlainSpec:
    """The key of one leaf. Raises SignatureError for sparse tensors, iterators and values that can't be hashed."""
    if isinstance(leaf, torch.Tensor):
        if leaf.layout is not torch.strided or leaf.is_quantized or leaf.is_nested:
            raise SignatureError(
                f"argument `{name}` is not a plain strided tensor ({leaf.layout})",
                cure="Pass its dense parts as separate tensors.",
            )
        return TensorSpec.of(leaf)
    if isinstance(leaf, Iterator):
        raise SignatureError(
            f"argument `{name}` is an iterator ({type(leaf).__name__}), which can be run through only once",
            cure="Pass what it yields, in a list or a tuple.",
        )
    if isinstance(leaf, float):
        return PlainSpec(float, leaf.hex())  # nan equals nan, -0.0 differs from 0.0
    try:
        hash(leaf)
    except TypeError:
        raise SignatureError(
            f"argument `{name}` of type {type(leaf).__name__} is neither a tensor nor hashable: it chooses no graph",
            cure="Pass its tensors and numbers as arguments, or make the type a frozen dataclass.",
        ) from None
    return PlainSpec(type(leaf), leaf)


def alias_pattern(leaves: Sequence[Any]) -> tuple[int, ...]:
    """For each leaf the index of the first leaf that is the very same memory seen the same way (itself else)."""
    first: dict[object, int] = {}
    pattern = []
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and leaf.numel():
            key: object = (leaf.data_ptr(), leaf.shape, leaf.stride(), leaf.dtype, leaf.device)
        else:
            key = i
        pattern.append(first.setdefault(key, i))
    return tuple(pattern)


def _walk(value: Any, name: str, leaves: list[Any], names: list[str]) -> Tree:
    """Appends the leaves of `value` and gives its tree."""
    kind, cls, items = take_apart(value)
    if kind == "leaf":
        leaves.append(value)
        names.append(name)
        return LEAF
    children = tuple(_walk(item, _path(kind, name, key), leaves, names) for key, item in items)
    return Tree(kind, cls, tuple(key for key, _ in items), children)


def take_apart(value: Any) -> tuple[str, type | None, list[tuple[Any, Any]]]:
    """One level of a container: its kind, its class, its (key, child) pairs. A leaf has kind "leaf" and no pairs."""
    cls = type(value)
    if isinstance(value, tuple):
        return "tuple", cls, list(enumerate(value))
    if cls is list:
        return "list", cls, list(enumerate(value))
    if cls in (dict, OrderedDict):
        return "dict", cls, list(value.items())  # in its order: the function may iterate over it
    if (functions := registered(cls)) is not None:
        children, context = functions[0](value)
        return "registered", cls, [((i, _Context(context)), child) for i, child in enumerate(children)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and _holds_tensors(value):
        return "record", cls, [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return "leaf", None, []


class _Context:
    """The pytree context of a registered type, hashable by its text: the types themselves may be unhashable."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.text = repr(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Context) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)


def registered(cls: type) -> tuple[Callable[[Any], Any], Callable[[Any, Any], Any]] | None:
    """The flatten and unflatten functions that someone registered for this class with torch's pytree, or None."""
    from torch.utils import _pytree

    node = _pytree.SUPPORTED_NODES.get(cls)
    return (node.flatten_fn, node.unflatten_fn) if node else None


def _holds_tensors(value: Any) -> bool:
    """A dataclass without tensors stays one leaf: it is a plain value, and the key if it can be hashed."""
    return any(_is_structure(getattr(value, field.name, None)) for field in dataclasses.fields(value))


def _is_structure(item: Any) -> bool:
    if isinstance(item, (list, tuple)):
        return any(map(_is_structure, item))
    if isinstance(item, dict):
        return any(map(_is_structure, item.values()))
    return isinstance(item, torch.Tensor) or (
        dataclasses.is_dataclass(item) and not isinstance(item, type) and _holds_tensors(item)
    )


def _path(kind: str, name: str, key: Any) -> str:
    if kind == "record":
        return f"{name}.{key}"
    return f"{name}[{key!r}]" if kind == "dict" else f"{name}[{key[0] if isinstance(key, tuple) else key}]"


def _build(tree: Tree, following: Callable[[], Any]) -> Any:
    if tree.kind == "leaf":
        return following()
    children = [_build(child, following) for child in tree.children]
    if tree.kind == "list":
        return children
    if tree.kind == "dict":
        return (tree.cls or dict)(zip(tree.keys, children, strict=True))
    if tree.kind == "record":
        return _build_record(tree, children)
    if tree.kind == "registered":
        return _build_registered(tree, children)
    if tree.cls is tuple:
        return tuple(children)
    return tree.cls._make(children) if hasattr(tree.cls, "_make") else tree.cls(children)  # type: ignore[misc, union-attr]


def _build_record(tree: Tree, children: list[Any]) -> Any:
    assert tree.cls is not None
    if issubclass(tree.cls, dict):  # a record that is a dict fills it when it is made
        return tree.cls(**dict(zip(tree.keys, children, strict=True)))
    value: Any = object.__new__(tree.cls)  # fields, not __init__: a record may compute in __post_init__
    for key, child in zip(tree.keys, children, strict=True):
        object.__setattr__(value, key, child)
    return value


def _build_registered(tree: Tree, children: list[Any]) -> Any:
    assert tree.cls is not None
    functions = registered(tree.cls)
    assert functions is not None, f"{tree.cls} was registered when the call was captured"
    context = tree.keys[0][1].value if tree.keys else None
    return functions[1](children, context)
