"""What a call changes beside its result, and how it is put back: the "exactly once" of the guard.

Warm-up, capture and verification run the user's code several times; afterwards the world must look as after one eager
call. A `Snapshot` holds three things: which object sits in every place (bindings), the bytes of every tensor, and the
host's state (optimizer tables, counters, lists, random generators). Restoring writes bytes back *in place*: a graph
knows tensors by address.
"""

from __future__ import annotations

import functools
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from graphlint.runtime.found import Found, Slot, module_tensors
from graphlint.runtime.observe import bytes_of

_ATOMS = (bool, int, float, str, bytes, type(None), torch.Tensor)
_DEEP = 5


@dataclass
class HostChange:
    """A plain value that one call changed on the host: replaying the graph will not."""

    label: str
    before: object
    after: object


class State:
    """The mutable world of a guarded function on one device."""

    def __init__(self, found: Found, device: torch.device, default_generators: list[torch.Generator]) -> None:
        self.found = found
        self.device = device
        self.generators = [*default_generators]
        self.copied: frozenset[int] | None = None  # storages that snapshots copy beside buffers; None: everything
        self.observed: list[torch.Tensor] = []  # tensors outside `found` that a watched call wrote
        self.add_generators(found.generators)

    def add_generators(self, generators: list[torch.Generator]) -> None:
        """More generators to set back; each is kept once."""
        for gen in generators:
            if all(gen is not known for known in self.generators):
                self.generators.append(gen)

    def slots(self) -> Iterator[Slot]:
        """Every place that holds a tensor now. Optimizer state and gradients come and go, so this is listed anew
        each time.
        """
        for path, module in self.found.submodules():
            yield from module_tensors(path, module)
        yield from self.found.loose()
        for label, param in self.found.parameters():
            yield Slot(f"{label}.grad", "gradient", _grad_getter(param), _grad_setter(param))
        names = {id(param): label for label, param in self.found.parameters()}
        for path, optimizer in self.found.optimizers.items():
            yield from _optimizer_slots(path, optimizer, names)
        for path, scaler in self.found.scalers.items():
            for name in ("_scale", "_growth_tracker"):
                yield Slot(
                    f"{path}.{name}", "scaler", _dict_getter(scaler.__dict__, name), _dict_setter(scaler.__dict__, name)
                )

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that exist now, by label; the same tensor in two places is listed once."""
        out: dict[str, torch.Tensor] = {}
        seen: set[int] = set()
        for slot in self.slots():
            tensor = slot.get()
            if isinstance(tensor, torch.Tensor) and id(tensor) not in seen and tensor.layout is torch.strided:
                seen.add(id(tensor))
                out[slot.label] = tensor
        for i, tensor in enumerate(self.observed):
            if id(tensor) not in seen:
                out[f"tensor #{i} of shape {tuple(tensor.shape)}"] = tensor
        return out

    def kinds(self) -> dict[str, str]:
        """What each label of `tensors()` is: a parameter, a gradient, an optimizer's `exp_avg`."""
        return {
            slot.label: f"{slot.kind} {slot.label.rsplit('[', 1)[-1]}" if slot.kind == "optimizer-state" else slot.kind
            for slot in self.slots()
        }

    def snapshot(self, room: int) -> Snapshot:
        """Everything as it is now. Copies stay on the device while they take less than half of `room` bytes, else on
        the host.
        """
        return Snapshot(self, room)


class Snapshot:
    """One moment of a State."""

    def __init__(self, state: State, room: int) -> None:
        self.state = state
        self.bindings = [(slot, slot.get()) for slot in state.slots()]
        self._parameters = [(param, param.grad) for _, param in state.found.parameters()]
        self._host = [(label, *freeze(owner.__dict__)) for label, owner in state.found.owners()]
        self._plain = [(plain, plain.look(plain.key)) for plain in state.found.plain if plain.put is not None]
        self._containers = [(label, c, len(c), _frozen(c, _DEEP)) for label, c in state.found.containers.items()]
        self._random = _random_state(state.generators)
        self._bytes = self._copy(room)

    def _copy(self, room: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        stores: dict[tuple[int, torch.device], torch.Tensor] = {}
        copied = self.state.copied
        places = [(slot.kind, value) for slot, value in self.bindings] + [("tensor", t) for t in self.state.observed]
        for kind, tensor in places:
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                if copied is not None and kind != "buffer" and storage.data_ptr() not in copied:
                    continue
                if storage.nbytes():
                    stores.setdefault((storage.data_ptr(), tensor.device), tensor)
        live = [bytes_of(tensor) for tensor in stores.values()]
        total = sum(view.numel() for view in live if view.device == self.state.device)
        with torch.inference_mode(False):
            if 2 * total < room:
                return [(view, view.clone()) for view in live]
            return [(view, view.to("cpu", copy=True)) for view in live]

    @property
    def nbytes(self) -> int:
        """Bytes that the copies take."""
        return sum(copy.numel() for _, copy in self._bytes)

    def restore(self) -> None:
        """Puts bindings, bytes, host state and generators back; what was born since then is dropped."""
        for param, grad in self._parameters:
            if param.grad is not grad:
                param.grad = grad
        for _, _, put_back in self._host:
            put_back()
        for plain, value in self._plain:
            if plain.put is not None and plain.look(plain.key) is not value:
                plain.put(value)
        for _, _, _, refill in self._containers:
            if refill is not None:
                refill()
        for slot, tensor in self.bindings:
            if slot.get() is not tensor:
                slot.set(tensor)
        self.write_bytes()
        self.restore_random()

    def write_bytes(self) -> None:
        """Copies the saved bytes into the tensors of this snapshot."""
        by_device: dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for live, copy in self._bytes:
            lives, copies = by_device.setdefault(live.device, ([], []))
            lives.append(live)
            copies.append(copy)
        with torch.inference_mode(False), torch.no_grad():
            for lives, copies in by_device.values():
                torch._foreach_copy_(lives, copies)

    def restore_random(self) -> None:
        """Sets every generator back, Python's and NumPy's too."""
        for put_back in self._random:
            put_back()

    def host_changes(self) -> list[HostChange]:
        """The plain values that differ from this moment now."""
        changes = []
        for plain, before in self._plain:
            now = plain.look(plain.key)
            if now is not before and now != before:
                changes.append(HostChange(plain.label, before, now))
        for label, container, size, _ in self._containers:
            if len(container) != size:
                changes.append(HostChange(f"len({label})", size, len(container)))
        seen = {change.label for change in changes}
        for (label, saved, _), (_, owner) in zip(self._host, self.state.found.owners(), strict=False):
            library = type(owner).__module__.startswith("torch.")
            for key, now in owner.__dict__.items():
                if library and key.startswith("_"):
                    continue  # torch's own books
                before = saved.get(key, _MISSING)
                if before is _MISSING or f"{label}.{key}" in seen or f"len({label}.{key})" in seen:
                    continue
                if isinstance(now, (bool, int, float, str)) and now is not before and now != before:
                    changes.append(HostChange(f"{label}.{key}", before, now))
                elif isinstance(now, (list, deque)) and isinstance(before, _Sized) and len(now) != before.size:
                    changes.append(HostChange(f"len({label}.{key})", before.size, len(now)))
        return changes


class _Sized:
    """Stands for a list in a saved `__dict__`: only its length is compared."""

    def __init__(self, size: int) -> None:
        self.size = size


_MISSING = object()


def freeze(attributes: dict[str, Any]) -> tuple[dict[str, Any], Callable[[], None]]:
    """A shallow copy of an object's `__dict__` (lists by their length) and a function that puts the object back as it
    is now.
    """
    saved = dict(attributes)
    inner = [put_back for value in saved.values() if (put_back := _frozen(value, _DEEP)) is not None]

    def restore() -> None:
        for key in [key for key in attributes if key not in saved]:
            del attributes[key]
        for key, value in saved.items():
            if attributes.get(key, _MISSING) is not value:
                attributes[key] = value
        for put_back in inner:
            put_back()

    shown = {key: _Sized(len(value)) if isinstance(value, (list, deque)) else value for key, value in saved.items()}
    return shown, restore


def _frozen(value: Any, depth: int) -> Callable[[], None] | None:
    """A function that gives a container the elements it has now, recursively; None for what is no container."""
    if depth == 0:
        return None
    if isinstance(value, dict):
        items: Any = list(value.items())
        fill: Callable[[Any], None] = functools.partial(_set_items, value)  # `update` of a Counter counts
        elements = list(value.values())
    elif isinstance(value, (list, deque, set)):
        items = list(value)
        fill = value.update if isinstance(value, set) else value.extend
        elements = items
    else:
        return None
    inner = [f for item in elements if not isinstance(item, _ATOMS) and (f := _frozen(item, depth - 1)) is not None]

    def restore() -> None:
        if not _same(value, items):
            value.clear()
            fill(items)
        for put_back in inner:
            put_back()

    return restore


def _set_items(mapping: Any, items: list[tuple[Any, Any]]) -> None:
    for key, item in items:
        mapping[key] = item


def _same(value: Any, items: list[Any]) -> bool:
    if len(value) != len(items):
        return False
    if isinstance(value, dict):
        return all(value.get(key, _MISSING) is item for key, item in items)
    if isinstance(value, set):
        return all(item in value for item in items)
    return all(now is item for now, item in zip(value, items, strict=True))


def _random_state(generators: list[torch.Generator]) -> list[Callable[[], None]]:
    """One function per random source that sets it back to now."""
    states = [(gen, gen.get_state()) for gen in [*generators, torch.default_generator]]
    python = random.getstate()
    undo: list[Callable[[], None]] = [_setter_of(gen.set_state, state) for gen, state in states]
    undo.append(_setter_of(random.setstate, python))
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        undo.append(_setter_of(numpy.random.set_state, numpy.random.get_state()))
    return undo


def _setter_of(put: Callable[[Any], Any], state: Any) -> Callable[[], None]:
    return lambda: put(state)


def _optimizer_slots(path: str, optimizer: torch.optim.Optimizer, names: dict[int, str]) -> Iterator[Slot]:
    """Looked up through the optimizer each time: loading a state replaces its tables."""
    for param, entry in list(optimizer.state.items()):
        owner = names.get(id(param), "?")
        if isinstance(entry, dict):
            for name, value in list(entry.items()):
                if isinstance(value, torch.Tensor):
                    label = f"{path}.state[{owner}]['{name}']"
                    get = functools.partial(_state_of, optimizer, param, name)
                    yield Slot(label, "optimizer-state", get, functools.partial(_set_state, optimizer, param, name))
    for g, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if isinstance(value, torch.Tensor):
                label = f"{path}.param_groups[{g}]['{name}']"
                get = functools.partial(group_value, optimizer, g, name)
                yield Slot(label, "hyperparameter", get, functools.partial(_set_group, optimizer, g, name))


def group_value(optimizer: torch.optim.Optimizer, group: int, name: str) -> Any:
    """A hyperparameter as the optimizer has it now; None when it is gone."""
    groups = optimizer.param_groups
    return groups[group].get(name) if group < len(groups) else None


def _state_of(optimizer: torch.optim.Optimizer, param: torch.Tensor, name: str) -> Any:
    entry = optimizer.state.get(param)
    return entry.get(name) if entry else None


def _set_state(optimizer: torch.optim.Optimizer, param: torch.Tensor, name: str, value: Any) -> None:
    optimizer.state[param][name] = value


def _set_group(optimizer: torch.optim.Optimizer, group: int, name: str, value: Any) -> None:
    optimizer.param_groups[group][name] = value


def _grad_getter(param: torch.Tensor) -> Callable[[], Any]:
    return functools.partial(param.__getattribute__, "grad")


def _grad_setter(param: torch.Tensor) -> Callable[[Any], None]:
    def put(grad: Any) -> None:
        param.grad = grad

    return put


def _dict_getter(mapping: dict[Any, Any], key: Any) -> Callable[[], Any]:
    return functools.partial(mapping.get, key)


def _dict_setter(mapping: dict[Any, Any], key: Any) -> Callable[[Any], None]:
    def put(value: Any) -> None:
        mapping[key] = value

    return put
