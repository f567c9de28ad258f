"""What a program does with a graph's memory between replays: who owns it, who replaces it, who reads it too early,
which stream touched it last.

A graph keeps bare addresses. Here every address is followed by name: the module, attribute or dictionary that leads
to it. The watch is asked at every line of the user's, so a change is told at the line that made it.
"""

from __future__ import annotations

import functools
import gc
import types
import weakref
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from graphlint.runtime.dryrun import hoststate, sites
from graphlint.runtime.dryrun.records import Site
from graphlint.runtime.dryrun.session import Region, Session

Place = tuple[str, int]


class Change(msgspec.Struct, frozen=True):
    """Memory that a graph reads was replaced or let go: which, under which name, after which line; `gone` where the
    name leads to nothing any more."""

    kind: str
    path: str
    place: Place
    gone: bool = False


class _Watched:
    """One name that led to memory of a region when it was captured."""

    __slots__ = ("get", "kind", "path", "storage", "weak")

    def __init__(self, kind: str, path: str, get: Callable[[], Any], tensor: torch.Tensor) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef

        self.kind, self.path, self.get = kind, path, get
        self.weak = StorageWeakRef(tensor.untyped_storage())  # keeps the number below from being given out again
        self.storage = tensor.untyped_storage()._cdata

    def gone(self) -> bool:
        """Whether the name leads to no tensor any more."""
        return not isinstance(self.get(), torch.Tensor)

    def moved(self) -> bool:
        """Whether the name leads elsewhere now."""
        now = self.get()
        return not isinstance(now, torch.Tensor) or now.untyped_storage()._cdata != self.storage


class Watch:
    """Follows the memory of one region from its capture on.

    Named memory is followed by its name; memory that no name leads to (a local of a helper, the value of a cached
    function) by whether it still lives.
    """

    def __init__(
        self,
        session: Session,
        region: Region,
        roots: dict[str, Any],
        names: dict[str, Callable[[], Any]] | None = None,
    ) -> None:
        identity = session.roles.identity
        reads = {operand.storage for op in region.trace.ops for operand in op.operands if operand.born < 0}
        self.outputs = {storage for op in region.trace.ops for storage in op.outputs if storage in region.born}
        lasting = ("parameter", "buffer", "gradient", "optimizer-state")
        self._watched = []
        self._results = []
        named: set[int] = set()
        for watched in _names(roots, names or {}):
            number = identity(watched.get())
            if number in reads or (number in region.born and watched.kind in lasting):
                self._watched.append(watched)
                named.add(number)
            elif number in region.born:
                self._results.append(watched)
        self.inputs = reads
        self._living = dict(session.living(reads - named))
        self._modes = {path: (weakref.ref(module), _mode(module)) for path, module in _modules(roots)}
        self.changes: dict[str, Change] = {}
        self.dead: dict[int, Place] = {}

    def look(self, place: Place) -> None:
        """Asks every name where it leads; `place` is the line that has just run."""
        for watched in self._watched:
            if watched.path not in self.changes and watched.moved():
                self.changes[watched.path] = Change(watched.kind, watched.path, place, watched.gone())
            elif watched.path in self.changes and not watched.moved():
                del self.changes[watched.path]  # it was put back before any replay
        for path, (module_ref, before) in self._modes.items():
            module = module_ref()
            now = before if module is None else _mode(module)
            if _same_mode(before, now):
                self.changes.pop(f"{path} mode", None)
            elif f"{path} mode" not in self.changes:
                kind = "hook" if now[2] != before[2] else "mode"
                self.changes[f"{path} mode"] = Change(kind, f"{path}.training" if now[0] != before[0] else path, place)
        for number, ref in list(self._living.items()):
            if ref.expired():
                self.dead[number] = place
                del self._living[number]

    def strayed(self) -> list[tuple[str, torch.Tensor]]:
        """Names that led to results of the region and lead to other memory now, with the tensor that they lead to."""
        found = [(watched.path, watched.get()) for watched in self._results if watched.moved()]
        return [(path, tensor) for path, tensor in found if isinstance(tensor, torch.Tensor)]


def _modules(roots: dict[str, Any]) -> list[tuple[str, torch.nn.Module]]:
    return [(path, value) for path, value in hoststate.reachable(roots) if isinstance(value, torch.nn.Module)]


_Mode = tuple[bool, dict[int, bool], int]


def _same_mode(before: _Mode, now: _Mode) -> bool:
    """Whether nothing was switched; a parameter that was replaced is another matter."""
    switched = any(now[1].get(number, wanted) != wanted for number, wanted in before[1].items())
    return before[0] == now[0] and before[2] == now[2] and not switched


def _mode(module: torch.nn.Module) -> _Mode:
    """What the graph has frozen of a module: training, which parameters want gradients, how many hooks there are."""
    wanted = {id(p): p.requires_grad for p in module._parameters.values() if p is not None}
    return (
        module.training,
        wanted,
        len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._backward_hooks),
    )


def _names(roots: dict[str, Any], names: dict[str, Callable[[], Any]]) -> list[_Watched]:
    """Every name below the roots that leads to a tensor, most telling name first; each memory once per owner."""
    found: list[_Watched] = []
    seen: set[int] = set()

    def add(kind: str, path: str, get: Callable[[], Any]) -> None:
        tensor = get()
        if isinstance(tensor, torch.Tensor):
            key = tensor.untyped_storage()._cdata
            if key not in seen:
                seen.add(key)
                found.append(_Watched(kind, path, get, tensor))

    objects = list(hoststate.reachable(roots))
    for path, value in objects:
        if isinstance(value, torch.nn.Module):
            for name in value._parameters:
                add("parameter", f"{path}.{name}", _weakly(value, "_parameters", name))
            for name in value._buffers:
                add("buffer", f"{path}.{name}", _weakly(value, "_buffers", name))
    for path, value in objects:
        if isinstance(value, torch.nn.Module):
            for name, parameter in value._parameters.items():
                if parameter is not None and parameter.grad is not None:
                    add("gradient", f"{path}.{name}.grad", _gradient(parameter))
        if isinstance(value, torch.optim.Optimizer):
            _optimizer_names(path, value, add)
    for path, value in objects:
        _plain_names(path, value, add)
    for name, get in names.items():
        add("attribute", name, get)
    return found


def _optimizer_names(path: str, optimizer: Any, add: Callable[[str, str, Callable[[], Any]], None]) -> None:
    ref = weakref.ref(optimizer)
    for group, settings in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(settings["params"]):
            add(
                "parameter",
                f"{path} parameter {index}",
                _at(ref, functools.partial(_parameter_now, group, index)),
            )
            if parameter.grad is not None:
                add("gradient", f"{path} parameter {index}.grad", _gradient(parameter))
            for key in optimizer.state.get(parameter, {}):
                weak = weakref.ref(parameter)
                add(
                    "optimizer-state",
                    f"{path}.state[{hoststate.spelled(key)}]",
                    _at(ref, functools.partial(_state_now, weak, key)),
                )
        if isinstance(settings.get("lr"), torch.Tensor):
            add(
                "optimizer-state",
                f"{path}.param_groups[{group}]['lr']",
                _at(ref, functools.partial(_lr_now, group)),
            )


def _plain_names(path: str, value: Any, add: Callable[[str, str, Callable[[], Any]], None]) -> None:
    if isinstance(value, dict):
        for key, part in list(value.items()):
            if isinstance(part, torch.Tensor):
                add("entry", f"{path}[{hoststate.spelled(key)}]", functools.partial(value.get, key))
    elif isinstance(value, list):
        for index, part in enumerate(value):
            if isinstance(part, torch.Tensor):
                add("entry", f"{path}[{index}]", functools.partial(_item_now, value, index))
    elif isinstance(value, types.CellType):
        if hoststate._filled(value) and isinstance(value.cell_contents, torch.Tensor):
            add("attribute", path, functools.partial(_cell_now, value))
    elif isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, torch.optim.Optimizer):
        for name, part in list(vars(value).items()):
            if isinstance(part, torch.Tensor):
                try:
                    add("attribute", f"{path}.{name}", _at(weakref.ref(value), functools.partial(_attribute_now, name)))
                except TypeError:
                    add("attribute", f"{path}.{name}", functools.partial(_attribute_now, name, value))


def _parameter_now(group: int, index: int, optimizer: Any) -> Any:
    return optimizer.param_groups[group]["params"][index]


def _state_now(weak: Any, key: str, optimizer: Any) -> Any:
    return optimizer.state.get(weak(), {}).get(key)


def _lr_now(group: int, optimizer: Any) -> Any:
    return optimizer.param_groups[group]["lr"]


def _item_now(values: list[Any], index: int) -> Any:
    return values[index] if index < len(values) else None


def _cell_now(cell: types.CellType) -> Any:
    return cell.cell_contents if hoststate._filled(cell) else None


def _attribute_now(name: str, owner: Any) -> Any:
    return getattr(owner, name, None)


def _at(ref: Any, get: Callable[[Any], Any]) -> Callable[[], Any]:
    def now() -> Any:
        owner = ref()
        return None if owner is None else get(owner)

    return now


def _weakly(module: torch.nn.Module, table: str, name: str) -> Callable[[], Any]:
    return _at(weakref.ref(module), lambda m: getattr(m, table).get(name))


def _gradient(parameter: torch.Tensor) -> Callable[[], Any]:
    return _at(weakref.ref(parameter), lambda p: p.grad)


def holders(tensors: tuple[torch.Tensor, ...]) -> dict[int, set[tuple[int, str]]]:
    """Who keeps which tensor by name or in a list: id of the tensor -> `(id of the container, key)`; local names don't
    count. Looks through the whole heap once."""
    sites.forget_locals()
    wanted = {id(tensor) for tensor in tensors}
    found: dict[int, set[tuple[int, str]]] = {number: set() for number in wanted}
    for owner in gc.get_referrers(*tensors) if tensors else ():
        kept = _kept_by(owner)
        for key, part in kept.items() if isinstance(kept, dict) else enumerate(kept):
            if id(part) in wanted:
                found[id(part)].add((id(kept), str(key) if isinstance(kept, dict) else f"[{key}]"))
    return found


def _kept_by(owner: Any) -> dict[Any, Any] | list[Any]:
    """The dictionary or list through which a container keeps its parts for good."""
    if isinstance(owner, dict):
        return owner if "__builtins__" not in owner else {}
    if isinstance(owner, list):
        return owner
    attributes = {} if isinstance(owner, (types.FrameType, tuple, types.CellType)) else getattr(owner, "__dict__", {})
    return attributes if isinstance(attributes, dict) else {}


class Races:
    """Who touched which memory last, on which stream, and whether the toucher of now has waited for it."""

    def __init__(self, session: Session) -> None:
        self._streams = session.streams
        self._written: dict[int, tuple[int, int, Site, str]] = {}
        self._read: dict[int, list[tuple[int, int, Site, str]]] = {}
        self.host: dict[int, int] = {}

    def synchronized(self, stream: int | None = None) -> None:
        """The host has waited for a stream (or for all)."""
        for number in self._streams.clocks if stream is None else (stream,):
            for other, count in self._streams.clocks[number].items():
                self.host[other] = max(self.host.get(other, 0), count)

    def touch(self, reads: set[int], writes: set[int], site: Site, what: str) -> list[tuple[str, Site, str, Site, str]]:
        """Work on the current stream; returns conflicts as (`read` or `write` before, its site, what it was, this
        site, what this is)."""
        stream = self._streams.current
        seen, now = self._streams.clocks[stream], self._streams.clocks[stream].get(stream, 0)
        found = []
        for storage in reads | writes:
            last = self._written.get(storage)
            if last and last[0] != stream and seen.get(last[0], 0) < last[1]:
                found.append(("write", last[2], last[3], site, what))
        for storage in writes:
            for other in self._read.get(storage, ()):
                if other[0] != stream and seen.get(other[0], 0) < other[1]:
                    found.append(("read", other[2], other[3], site, what))
            self._written[storage] = (stream, now, site, what)
            self._read[storage] = []
        for storage in reads - writes:
            self._read.setdefault(storage, []).append((stream, now, site, what))
        return found

    def host_writes(self, storages: set[int]) -> list[Site]:
        """The host writes pinned memory; returns the sites of device work that may still read it."""
        return [r[2] for storage in storages for r in self._read.get(storage, ()) if self.host.get(r[0], 0) < r[1]]
