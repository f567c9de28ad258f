"""What a guarded function may return: tensors in containers that can be rebuilt, and plain values that stay as they
are. Tensors in any other object would be those of the capture for ever.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from graphlint.runtime.discover import SCHEDULERS, is_scaler
from graphlint.runtime.errors import SignatureError, Where

_DEPTH = 4
_BODIES = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)
_STATE = (torch.nn.Module, torch.optim.Optimizer, torch.Generator, *SCHEDULERS)
_PLAIN = (bool, int, float, complex, str, bytes)
_CURE = "Return its tensors in a tuple, list, dict or dataclass, or register its class with torch's pytree."


def check_result(leaves: Sequence[Any], names: Sequence[str], known: set[int], where: Where | None) -> None:
    """Refuses a result whose tensors a replay can't reach. `known` are the ids of objects that are arguments or state.

    Raises:
        SignatureError: a generator or an iterator, or an object of the call's own that holds tensors.
    """
    for leaf, name in zip(leaves, names, strict=True):
        if isinstance(leaf, torch.Tensor) or leaf is None or isinstance(leaf, _PLAIN) or id(leaf) in known:
            continue
        kind, said = type(leaf).__name__, ""
        if isinstance(leaf, (*_BODIES, Iterator)):
            said, cure = f"the {name} is a {kind}, whose body would run after the call", "Return what it yields."
        elif holds_tensors(leaf):
            said, cure = f"the {name} is a {kind}, and a replay can't reach the tensors that it holds", _CURE
        if said:
            raise SignatureError(said, stage="warmup", where=where, cure=cure)


def holds_tensors(value: Any, depth: int = _DEPTH) -> bool:
    """Whether tensors lie in an object: in its attributes, its elements, or the closure of a function."""
    if isinstance(value, torch.Tensor):
        return True
    if depth == 0 or isinstance(value, (*_STATE, type, types.ModuleType, *_PLAIN)) or is_scaler(value):
        return False
    return any(holds_tensors(part, depth - 1) for part in _parts(value))


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        yield from value
    yield from getattr(value, "__dict__", {}).values()
    for name in (slot for cls in type(value).__mro__ for slot in getattr(cls, "__slots__", ())):
        yield getattr(value, name, None)
    yield from getattr(value, "__defaults__", None) or ()
    for cell in getattr(value, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:
            continue


def host_difference(eager: Sequence[Any], graph: Sequence[Any]) -> str:
    """The first plain value of a result that the graph has frozen: eager gives another one. Empty when none differs."""
    for i, (want, have) in enumerate(zip(eager, graph, strict=False)):
        if isinstance(want, _PLAIN) and (type(want) is not type(have) or (want != have and want == want)):
            return f"`output[{i}]` is {want!r} from eager and {have!r} from the graph: it was computed on the host"
    return ""


def refuse_function(fn: Callable[..., Any]) -> None:
    """Raises TypeError for what can't be guarded: a class, a generator or coroutine function, no callable at all."""
    code = getattr(getattr(fn, "__func__", fn), "__code__", None)
    name = getattr(fn, "__name__", type(fn).__name__)
    if isinstance(fn, type):
        raise TypeError(
            f"capture_safe guards functions, methods and modules: decorate a method of {name}, or an instance"
        )
    if not callable(fn):
        raise TypeError(f"capture_safe guards functions, methods and modules, not a {type(fn).__name__}")
    if code is not None and code.co_flags & 0x2A0:  # generator, coroutine, asynchronous generator
        raise TypeError(
            f"{name} only makes a generator or a coroutine when called; guard the function that does the work"
        )
