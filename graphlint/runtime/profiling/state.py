"""A snapshot of everything a step changes, and its return in place, so that measuring leaves no trace.

Values are copied back into the same tensors: addresses that a captured graph relies on stay what they were.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from graphlint.runtime.profiling.reach import Reached

Restore = Callable[[], None]


class Snapshot:
    """State of what `reach()` found, and of the random generators, at one moment.

    Args:
        reached: what belongs to the step.
        on_host: keep the copies in host memory; slower, and no device memory is needed for them.
    """

    def __init__(self, reached: Reached, on_host: bool = False) -> None:
        self._on_host = on_host
        self._restores: list[Restore] = []
        for tensor in state_tensors(reached):
            self._restores.append(self._tensor(tensor))
        for module in reached.modules.values():
            self._restores.extend(self._gradient(p) for p in module.parameters())
        for optimizer in reached.optimizers.values():
            self._restores.append(self._optimizer(optimizer))
        for keeper in reached.keepers.values():
            self._restores.append(_keeper(keeper))
        for slot in reached.slots:
            value = copy.copy(slot.get())
            self._restores.append(lambda slot=slot, value=value: slot.set(copy.copy(value)))  # type: ignore[misc]
        self._restores.append(_random(list(reached.generators.values())))

    def restore(self) -> None:
        """Sets everything back, in place. State that was born since then is dropped."""
        with torch.no_grad():
            for restore in self._restores:
                restore()

    def _copy(self, tensor: Any) -> Any:
        return tensor.detach().to("cpu", copy=True) if self._on_host else tensor.detach().clone()

    def _tensor(self, tensor: Any) -> Restore:
        saved = self._copy(tensor)

        def restore() -> None:
            tensor.detach().copy_(saved)

        return restore

    def _gradient(self, parameter: Any) -> Restore:
        gradient = parameter.grad
        saved = None if gradient is None else self._copy(gradient)

        def restore() -> None:
            if saved is None:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = saved.to(parameter.device, copy=True)
            else:
                parameter.grad.detach().copy_(saved)

        return restore

    def _optimizer(self, optimizer: Any) -> Restore:
        groups = [self._values({k: v for k, v in g.items() if k != "params"}) for g in optimizer.param_groups]
        states = {p: self._values(s) for p, s in optimizer.state.items()}

        def restore() -> None:
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                _put_back(group, values)
            for parameter in [p for p in optimizer.state if p not in states]:
                del optimizer.state[parameter]
            for parameter, values in states.items():
                _put_back(optimizer.state[parameter], values)

        return restore

    def _values(self, values: dict[str, Any]) -> dict[str, Any]:
        return {k: self._copy(v) if isinstance(v, torch.Tensor) else copy.copy(v) for k, v in values.items()}


def state_tensors(reached: Reached) -> Iterator[Any]:
    """Parameters, buffers and loose tensors, each storage once."""
    seen: set[int] = set()
    for tensor in _all_tensors(reached):
        if id(tensor) not in seen and tensor.layout == torch.strided:
            seen.add(id(tensor))
            yield tensor


def _all_tensors(reached: Reached) -> Iterator[Any]:
    for module in reached.modules.values():
        yield from module.parameters()
        yield from module.buffers()
    yield from reached.tensors.values()


def named_state(reached: Reached) -> Iterator[tuple[str, Any]]:
    """Every tensor that a step may change, by a name that a user knows: parameters, buffers, optimizer state."""
    names: dict[Any, str] = {}
    for root, module in reached.modules.items():
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            names[tensor] = f"{root}.{name}"
            yield f"{root}.{name}", tensor
    for root, optimizer in reached.optimizers.items():
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    yield f"{root}.state[{names.get(parameter, '?')}].{key}", value
    yield from reached.tensors.items()


def _put_back(target: dict[str, Any], saved: dict[str, Any]) -> None:
    for key, value in saved.items():
        held = target.get(key)
        if isinstance(value, torch.Tensor) and isinstance(held, torch.Tensor):
            held.detach().copy_(value)
        else:
            target[key] = copy.copy(value)
    for key in [k for k in target if k not in saved and k != "params"]:
        del target[key]


def _keeper(keeper: Any) -> Restore:
    saved = copy.deepcopy(keeper.state_dict())
    return lambda: keeper.load_state_dict(copy.deepcopy(saved))


def _random(generators: list[Any]) -> Restore:
    """The default generators of torch, Python and NumPy, and the step's own."""
    host, own, python = torch.get_rng_state(), [g.get_state() for g in generators], random.getstate()
    device = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    numpy = sys.modules.get("numpy")
    drawn = numpy.random.get_state() if numpy is not None else None

    def restore() -> None:
        torch.set_rng_state(host)
        random.setstate(python)
        if device:
            torch.cuda.set_rng_state_all(device)
        for generator, state in zip(generators, own, strict=True):
            generator.set_state(state)
        if numpy is not None and drawn is not None:
            numpy.random.set_state(drawn)

    return restore
