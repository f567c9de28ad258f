"""Finds what a function can reach before it runs: modules, optimizers, schedulers, generators, tensors, plain numbers.

A step is seldom given its state as arguments: it closes over a model and an optimizer, or reads them from `self` or
from its module. This walks closures, the globals that the code names, defaults, `self` and the functions it calls in
the user's own files. What it misses (state behind a C extension, say) can be declared: `capture_safe(modules=...,
optimizers=...)`.
"""

from __future__ import annotations

import functools
import io
import types
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from graphlint.runtime.found import MODULE_INTERNALS, PLAIN, WIDTH, Found, Plain, Slot, element, getter, setter
from graphlint.runtime.observe import is_library

_DEPTH = 4
SCHEDULERS = (torch.optim.lr_scheduler.LRScheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)


def discover(fn: Any, extra: dict[str, Any]) -> Found:
    """Walks from a callable; `extra` are declared objects by label."""
    found = Found()
    for label, value in extra.items():
        _visit(found, value, label, None, 0)
    _callable(found, fn, 0)
    return found


def add_arguments(found: Found, leaves: list[Any], names: tuple[str, ...]) -> None:
    """Modules, optimizers, schedulers, generators, and the user's own objects, that are handed in as arguments."""
    for leaf, name in zip(leaves, names, strict=True):
        kinds = (torch.nn.Module, torch.optim.Optimizer, torch.Generator, *SCHEDULERS)
        if isinstance(leaf, kinds) or is_scaler(leaf) or _has_attributes(leaf):
            _visit(found, leaf, name, None, 0)


def _has_attributes(leaf: Any) -> bool:
    return _is_users(type(leaf)) and hasattr(leaf, "__dict__") and not isinstance(leaf, (type, torch.Tensor))


def is_scaler(value: Any) -> bool:
    """A GradScaler of any spelling."""
    return hasattr(value, "_growth_tracker") and hasattr(value, "unscale_") and not isinstance(value, torch.nn.Module)


def _callable(found: Found, fn: Any, depth: int) -> None:
    if id(fn) in found._seen or depth > _DEPTH:
        return
    if isinstance(fn, torch.nn.Module):
        _visit(found, fn, "module" if depth == 0 else type(fn).__name__, None, depth)
        _method(found, type(fn), "forward", depth)
        return
    found._seen.add(id(fn))
    if isinstance(fn, functools.partial):
        _callable(found, fn.func, depth)
        for i, arg in enumerate(fn.args):
            _visit(found, arg, f"args[{i}]", None, depth + 1)
        for key, arg in fn.keywords.items():
            _visit(found, arg, key, None, depth + 1)
    elif isinstance(fn, types.MethodType):
        _visit(found, fn.__self__, "self", None, depth)
        _callable(found, fn.__func__, depth)
        _methods(found, fn.__func__, type(fn.__self__), depth)
    elif isinstance(fn, types.FunctionType):
        _function(found, fn, depth)
    elif hasattr(fn, "__wrapped__"):
        _callable(found, fn.__wrapped__, depth)
    elif not isinstance(fn, (type, types.BuiltinFunctionType)) and callable(fn):
        _visit(found, fn, type(fn).__name__, None, depth)
        _method(found, type(fn), "__call__", depth)


def _methods(found: Found, fn: Any, cls: type, depth: int) -> None:
    """The methods of the same class that a method names, and those that they name."""
    names, todo = set[str](), [fn]
    while todo:
        code = getattr(todo.pop(), "__code__", None)
        for name in _global_names(code) - names if code is not None else ():
            names.add(name)
            method = getattr(cls, name, None)
            if isinstance(method, types.FunctionType) and not is_library(method.__code__.co_filename):
                _callable(found, method, depth + 1)
                todo.append(method)


def _method(found: Found, cls: type, name: str, depth: int) -> None:
    method = getattr(cls, name, None)
    if isinstance(method, types.FunctionType):
        _function(found, method, depth + 1)


def _function(found: Found, fn: types.FunctionType, depth: int) -> None:
    filename = fn.__code__.co_filename
    if is_library(filename) and not (
        depth == 0 and filename.startswith("<")
    ):  # what is guarded may be text that was run
        if hasattr(fn, "__wrapped__"):  # a decorator of torch around the user's function
            _callable(found, fn.__wrapped__, depth)
        elif depth == 0:
            _closure(found, fn, depth)
        return
    _closure(found, fn, depth)
    names = _global_names(fn.__code__)
    _names(found, fn.__globals__, names, "", depth)
    for name in names:
        module = fn.__globals__.get(name)
        if isinstance(module, types.ModuleType) and not is_library(getattr(module, "__file__", None) or "<"):
            _names(
                found, module.__dict__, names, f"{name}.", depth
            )  # of the user's own modules, what the code may ask for
    for i, default in enumerate(fn.__defaults__ or ()):
        _visit(found, default, f"{fn.__name__}.default[{i}]", None, depth + 1)


def _names(found: Found, space: dict[str, Any], names: set[str], prefix: str, depth: int) -> None:
    """The values of a module's names."""
    for name in names & space.keys():
        slot = Slot(prefix + name, "tensor", getter(space, name), setter(space, name))
        _visit(found, space[name], slot.label, slot, depth + 1, Plain(slot.label, space.get, name, slot.set))


def _closure(found: Found, fn: types.FunctionType, depth: int) -> None:
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:
            continue
        look = functools.partial(getattr, cell)
        slot = Slot(name, "tensor", functools.partial(look, "cell_contents"), functools.partial(_set_cell, cell))
        _visit(found, value, name, slot, depth + 1, Plain(name, look, "cell_contents", slot.set))


def _visit(found: Found, value: Any, label: str, slot: Slot | None, depth: int, plain: Plain | None = None) -> None:
    """Files one value under what it is, and walks on where it is the user's own object."""
    if isinstance(value, PLAIN):
        if plain is not None and value is not None:
            found.plain.append(plain if depth <= 1 else replace(plain, close=False))
        if value is None and slot is not None:
            found.names.append(slot)  # a tensor may come
        return
    if isinstance(value, torch.Tensor):
        if slot is not None:
            found.names.append(slot)
        return
    if id(value) in found._seen or depth > _DEPTH:
        return
    if isinstance(value, Iterator) and not isinstance(value, io.IOBase) and plain is not None and plain.put is not None:
        found.iterators.append(plain)
    if getattr(type(value), "is_guard", False):  # another guard: what it guards, not what it keeps
        _callable(found, value._fn, depth + 1)
        return
    if isinstance(value, torch.nn.Module):
        _module(found, value, label, depth)
        return
    if isinstance(value, torch.optim.Optimizer):
        found._seen.add(id(value))
        found.optimizers[_free(found.optimizers, label)] = value
    elif is_scaler(value):
        found._seen.add(id(value))
        found.scalers[_free(found.scalers, label)] = value
    elif isinstance(value, torch.Generator):
        found._seen.add(id(value))
        found.generators.append(value)
    elif isinstance(value, SCHEDULERS):
        _scheduler(found, value, label, depth)
    elif isinstance(value, (list, tuple, dict, set, deque)):
        _container(found, value, label, depth)
    elif isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
        _callable(found, value, depth + 1)
    elif not isinstance(value, (type, types.ModuleType)) and _is_users(type(value)):
        _object(found, value, label, depth)


def _module(found: Found, module: torch.nn.Module, label: str, depth: int) -> None:
    """A module, and what its own class or user keeps in it beside tensors: an optimizer, a scaler, a cache."""
    found._seen.add(id(module))
    found.modules[_free(found.modules, label)] = module
    for path, sub in module.named_modules():
        for name, value in () if isinstance(sub, torch.jit.ScriptModule) else list(sub.__dict__.items()):
            if name not in MODULE_INTERNALS and not isinstance(value, (torch.Tensor, *PLAIN)):
                _visit(found, value, f"{label}.{path}.{name}" if path else f"{label}.{name}", None, depth + 1)


def _scheduler(found: Found, value: Any, label: str, depth: int) -> None:
    """A learning rate scheduler, those that it chains, and the optimizer that they write to."""
    found._seen.add(id(value))
    found.schedulers[_free(found.schedulers, label)] = value
    for i, inner in enumerate(getattr(value, "_schedulers", ())):
        _visit(found, inner, f"{label}._schedulers[{i}]", None, depth + 1)
    _visit(found, getattr(value, "optimizer", None), f"{label}.optimizer", None, depth + 1)


def _container(found: Found, value: Any, label: str, depth: int) -> None:
    if len(value) > WIDTH:
        return
    found._seen.add(id(value))
    if not isinstance(value, tuple):
        found.containers[_free(found.containers, label)] = value
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in pairs:
        name = f"{label}[{key!r}]"
        if isinstance(value, (set, frozenset)):  # its elements have no places that could be looked at again
            _visit(found, item, name, None, depth + 1)
            continue
        look = value.get if isinstance(value, dict) else functools.partial(element, value)
        _visit(found, item, name, None, depth + 1, Plain(name, look, key))


def _object(found: Found, value: Any, label: str, depth: int) -> None:
    found._seen.add(id(value))
    attributes = getattr(value, "__dict__", None)
    if attributes is None:
        return
    found.objects[_free(found.objects, label)] = value
    for name, item in list(attributes.items()):
        plain = Plain(f"{label}.{name}", attributes.get, name, setter(attributes, name))
        _visit(found, item, f"{label}.{name}", None, depth + 1, plain)


def _global_names(code: types.CodeType) -> set[str]:
    """Names that the code, or a function nested in it, may look up among the globals."""
    names = set(code.co_names)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            names |= _global_names(const)
    return names


def _is_users(cls: type) -> bool:
    module = cls.__module__.split(".")[0]
    return module not in (
        "builtins",
        "torch",
        "numpy",
        "threading",
        "logging",
        "collections",
        "weakref",
        "types",
        "re",
        "graphlint",
    )


def _free(taken: dict[str, Any], label: str) -> str:
    name, i = label, 2
    while name in taken:
        name, i = f"{label}#{i}", i + 1
    return name


def _set_cell(cell: types.CellType, value: Any) -> None:
    cell.cell_contents = value
