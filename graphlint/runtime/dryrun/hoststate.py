"""The host side of a step: plain Python values in the objects that it can reach. Takes them down, compares them, puts
them back.

Replay runs no Python: a counter, a flag or a list that the step changes is changed once, at capture, and never again.
"""

from __future__ import annotations

import copy
import enum
import functools
import operator
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch

from graphlint.runtime.dryrun import sites

_LIMIT = 20_000
_PLAIN = (int, float, complex, str, bytes, bool, type(None), enum.Enum)


class Effect(msgspec.Struct, frozen=True):
    """One plain value that changed: `path` as a user would write it, the value before and after, and the attribute's
    bare name."""

    path: str
    name: str
    before: str
    after: str
    owner: str = ""


def reachable(roots: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every object with state that the roots lead to, with the path that leads there; each object once."""
    seen: set[int] = set()
    queue: deque[tuple[str, Any]] = deque(roots.items())
    while queue and len(seen) < _LIMIT:
        path, value = queue.popleft()
        if id(value) in seen or _opaque(value):
            continue
        seen.add(id(value))
        yield path, value
        queue.extend(_parts(path, value))


def _opaque(value: Any) -> bool:
    """Values without state of their own, or whose state is no business of ours."""
    if isinstance(value, (*_PLAIN, torch.Tensor, torch.dtype, torch.device, types.ModuleType, type, torch.Generator)):
        return True
    kind = type(value)
    return kind.__module__.startswith(("threading", "_thread", "logging", "graphlint", "_io", "weakref")) or isinstance(
        value, types.FrameType
    )


def spelled(key: object) -> str:
    """A key of a dictionary as a user would write it; an optimizer's are parameters, whose values nobody wants to
    read (on a device, to wait for).
    """
    return repr(key) if isinstance(key, (*_PLAIN, tuple)) else f"<{type(key).__name__}>"


def _parts(path: str, value: Any) -> list[tuple[str, Any]]:
    """What an object holds."""
    if isinstance(value, dict):
        return [(f"{path}[{spelled(key)}]", part) for key, part in list(value.items())]
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return [(f"{path}[{index}]", part) for index, part in enumerate(list(value))]
    if isinstance(value, types.FunctionType):
        return _function_parts(path, value)
    if isinstance(value, types.MethodType):
        return [(path.removesuffix("()"), value.__self__), (path, value.__func__)]
    if isinstance(value, functools.partial):
        return [(path, value.func), (f"{path}.args", value.args), (f"{path}.keywords", value.keywords)]
    if isinstance(value, types.CellType):
        return [(path, value.cell_contents)] if _filled(value) else []
    if isinstance(value, torch.nn.Module):
        return [(f"{path}.{name}", part) for name, part in _module_parts(value)]
    found = [(f"{path}.{name}", part) for name, part in list(getattr(value, "__dict__", {}).items())]
    return found + [(f"{path}.{name}", getattr(value, name)) for name in _slots(value)]


def _function_parts(path: str, value: types.FunctionType) -> list[tuple[str, Any]]:
    found = [(name, cell) for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False)]
    if not sites.is_installed(value.__code__.co_filename):
        names = [name for name in value.__code__.co_names if name in value.__globals__]
        found += [
            (name, value.__globals__[name])
            for name in names
            if not isinstance(value.__globals__[name], (types.ModuleType, type))
        ]
    wrapped = getattr(value, "__wrapped__", None)
    return [
        *found,
        *([(path, wrapped)] if wrapped is not None else []),
        *((path, part) for part in value.__defaults__ or ()),
    ]


def _module_parts(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for name, part in list(vars(module).items()):
        if name in ("_parameters", "_buffers", "_modules"):
            yield from part.items()
        elif name not in _MODULE_INTERNALS:
            yield name, part


_MODULE_INTERNALS = frozenset(k for k in vars(torch.nn.Module()) if k.startswith("_")) | {"call_super_init"}


def _slots(value: Any) -> list[str]:
    names = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()) or ()]
    return [name for name in names if isinstance(name, str) and not name.startswith("__") and hasattr(value, name)]


def _filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 (an empty cell raises)
    except ValueError:
        return False
    return True


def user_globals() -> dict[str, dict[str, Any]]:
    """The globals of every module of the user's, by module name."""
    found = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and "site-packages" not in file and not sites.is_library(file):
            found[name] = vars(module)
    return found


class HostState:
    """A picture of everything plain that the roots (and the globals of the user's modules) hold; can be compared and
    put back."""

    def __init__(self, roots: dict[str, Any]) -> None:
        self._pictures: list[tuple[str, Any, Any, Callable[[Any, Any], None]]] = []
        for path, value in reachable(roots):
            self._take(path, value)
        for name, namespace in user_globals().items():
            plain = _pictured(
                {
                    key: part
                    for key, part in namespace.items()
                    if (isinstance(part, _PLAIN) or _iterates(part)) and not key.startswith("__")
                }
            )
            self._pictures.append((name, namespace, plain, lambda target, saved: target.update(saved)))

    def _take(self, path: str, value: Any) -> None:
        if isinstance(value, dict):
            self._pictures.append((path, value, _pictured(value), _restore_dict))
        elif isinstance(value, list):
            self._pictures.append((path, value, list(value), _restore_list))
        elif isinstance(value, (set, deque)):
            self._pictures.append((path, value, type(value)(value), _restore_set))
        elif isinstance(value, types.CellType):
            if _filled(value):
                self._pictures.append((path, value, _pictured({"cell_contents": value.cell_contents}), _restore_slots))
        elif isinstance(value, torch.nn.Module):
            self._pictures.append((path, vars(value), _pictured(vars(value)), _restore_dict))
            for name in ("_parameters", "_buffers", "_modules"):
                self._pictures.append((path, vars(value)[name], dict(vars(value)[name]), _restore_dict))
        elif isinstance(getattr(value, "__dict__", None), dict):
            self._pictures.append((path, vars(value), _pictured(vars(value)), _restore_dict))
        slots = _slots(value)
        if slots:
            self._pictures.append((path, value, {name: getattr(value, name) for name in slots}, _restore_slots))

    def restore(self) -> None:
        """Puts every value back, in place."""
        for _, target, saved, put in self._pictures:
            put(target, saved)

    def effects(self) -> list[Effect]:
        """What has changed since the picture was taken: plain values, and lengths of containers."""
        found: list[Effect] = []
        for path, target, saved, _ in self._pictures:
            found.extend(_changes(path, target, saved))
        return found


def _restore_dict(target: Any, saved: Any) -> None:
    if len(target) != len(saved) or any(key not in target or target[key] is not part for key, part in saved.items()):
        target.clear()
        target.update(saved)


def _restore_list(target: Any, saved: Any) -> None:
    target[:] = saved


def _restore_set(target: Any, saved: Any) -> None:
    target.clear()
    getattr(target, "update" if isinstance(target, set) else "extend")(saved)


def _restore_slots(target: Any, saved: Any) -> None:
    for name, part in saved.items():
        try:
            setattr(target, name, part)
        except AttributeError:
            pass  # a read-only slot has not changed either


def _changes(path: str, target: Any, saved: Any) -> Iterator[Effect]:
    """Differences of one container or namespace; tensors are compared by the address watch, not here."""
    if isinstance(saved, dict):
        now = {key: getattr(target, key, None) for key in saved} if not isinstance(target, dict) else target
        attribute = not path.endswith("]")
        for key, before in saved.items():
            after = now.get(key)
            if before is not after and _differs(before, after):
                name = str(key)
                where = (
                    path
                    if isinstance(target, types.CellType)
                    else f"{path}.{name}"
                    if attribute
                    else f"{path}[{key!r}]"
                )
                yield Effect(
                    where, path if isinstance(target, types.CellType) else name, _told(before), _told(after), path
                )
        if isinstance(target, dict) and len(target) > len(saved) and not _is_namespace(target):
            fresh = [key for key in target if key not in saved]
            yield Effect(
                path, path.rsplit(".", 1)[-1], f"{len(saved)} entries", f"{len(target)} entries, new {fresh[0]!r}", path
            )
    elif len(target) != len(saved):
        yield Effect(path, path.rsplit(".", 1)[-1], f"{len(saved)} entries", f"{len(target)} entries", path)
    elif isinstance(saved, (list, deque)):
        for index, (before, after) in enumerate(zip(saved, target, strict=True)):
            if isinstance(before, _PLAIN) and isinstance(after, _PLAIN) and before != after:
                yield Effect(f"{path}[{index}]", path.rsplit(".", 1)[-1], repr(before), repr(after), path)


def _differs(before: Any, after: Any) -> bool:
    """Whether two values of one name differ in a way that Python code can see; tensors are followed elsewhere."""
    if isinstance(before, _PLAIN) and isinstance(after, _PLAIN):
        return bool(before != after)
    if _iterates(before) and _iterates(after):
        return operator.length_hint(before, -1) != operator.length_hint(after, -1)
    return (before is None) != (after is None) and not isinstance(before if after is None else after, torch.Tensor)


def _iterates(value: Any) -> bool:
    """Whether a value is one of Python's own iterators, which can be copied where they stand."""
    return type(value).__module__ in ("builtins", "itertools") and type(value).__name__.endswith(
        ("iterator", "count", "cycle")
    )


def _told(value: Any) -> str:
    if _iterates(value):
        return f"{operator.length_hint(value, 0)} items left"
    return repr(value) if isinstance(value, _PLAIN) else f"a {type(value).__name__}"


def _pictured(namespace: dict[Any, Any]) -> dict[Any, Any]:
    """A copy of a namespace in which iterators are copied too: running the step moves them on."""
    return {key: copy.copy(part) if _iterates(part) else part for key, part in namespace.items()}


def _is_namespace(target: dict[Any, Any]) -> bool:
    return "__name__" in target or "__builtins__" in target


def labels(roots: dict[str, Any], identity: Callable[[torch.Tensor], int]) -> dict[int, tuple[str, str]]:
    """Storage -> (kind, path) for every tensor that the roots lead to: `parameter`, `buffer`, `gradient`,
    `optimizer-state`, `argument`, `attribute`."""
    found: dict[int, tuple[str, str]] = {}

    def name(tensor: Any, kind: str, path: str) -> None:
        if isinstance(tensor, torch.Tensor):
            found.setdefault(identity(tensor), (kind, path))
            if tensor.is_leaf and tensor.grad is not None:
                found.setdefault(identity(tensor.grad), ("gradient", f"{path}.grad"))

    objects = list(reachable(roots))
    for path, value in objects:
        if isinstance(value, torch.nn.Module):
            for key, part in value._parameters.items():
                name(part, "parameter", f"{path}.{key}")
            for key, part in value._buffers.items():
                name(part, "buffer", f"{path}.{key}")
    for path, value in objects:
        if isinstance(value, torch.optim.Optimizer):
            for part in value.state.values():
                for key, tensor in part.items() if isinstance(part, dict) else ():
                    name(tensor, "optimizer-state", f"{path}.state[...][{key!r}]")
            for group in value.param_groups:
                for tensor in group["params"]:
                    name(tensor, "parameter", f"{path}.param_groups parameter")
                for key, tensor in group.items():
                    name(tensor, "lr" if key == "lr" else "attribute", f"{path}.param_groups[...][{key!r}]")
    for key, part in roots.items():
        name(part, "argument", key)
    for path, value in objects:
        for where, part in _parts(path, value):
            name(part, "attribute", where)
    return found
