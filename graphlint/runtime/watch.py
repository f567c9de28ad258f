"""What a graph relies on outside its arguments, as facts that cost a fraction of a microsecond to look at.

A fact is "this place still holds this object, at this address". On every replay the *anchors* are looked at (the first
parameter of each module, the learning rates, the numbers that the function itself reads), on every fourth one also one
more fact in turn, so each of N facts is seen within 4 N replays. Words are made only when a fact fails.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from graphlint.runtime.errors import CaptureError, error_of
from graphlint.runtime.found import Found, Plain, module_plain
from graphlint.runtime.state import State, group_value

ANCHORS = 6
EVERY = 4  # replays from one look at a fact in turn to the next
_RULE_OF_KIND = {
    "parameter": "replaced-parameter",
    "buffer": "replaced-buffer",
    "gradient": "replaced-gradient",
    "optimizer-state": "replaced-optimizer-state",
    "hyperparameter": "frozen-lr",
    "scaler": "replaced-optimizer-state",
    "tensor": "moved-tensor",
    "number": "frozen-scalar",
    "lr": "frozen-lr",
    "flag": "frozen-flag",
    "mode": "frozen-mode",
    "hooks": "python-hook",
}


class Fact(NamedTuple):
    """`look(key)` must give `held`; for tensors `address()` must give `at`, for numbers both are zero."""

    look: Callable[[Any], Any]
    key: Any
    held: Any
    address: Callable[[], int]
    at: int
    kind: str
    label: str

    def holds(self) -> bool:
        """Whether the fact is still true; a number that was bound anew to an equal value still holds."""
        now = self.look(self.key)
        if self.address is int:
            return now is self.held or (type(now) is type(self.held) and now == self.held)
        return now is self.held and self.address() == self.at

    def error(self, stage: str = "replay") -> CaptureError:
        """The fact as an error with rule and cure."""
        rule = _RULE_OF_KIND[self.kind]
        now = self.look(self.key)
        if self.kind == "hooks":
            reason = (
                f"`{self.label}` had {self.held} hook(s) at capture and has {now} now; the graph runs those of then"
            )
        elif self.address is not int:
            if isinstance(self.held, torch.Tensor) and isinstance(now, (int, float)):
                reason = (
                    f"`{self.label}` was a tensor at capture and is the number {now!r} now; the graph does not see it"
                )
            elif now is self.held:
                reason = f"`{self.label}` was given other memory since capture; the graph still reads the old"
            else:
                reason = f"`{self.label}` was replaced since capture; the graph still reads the tensor it held then"
        else:
            reason = (
                f"`{self.label}` was {self.held!r} at capture and is {now!r} now; the graph still uses {self.held!r}"
            )
        return error_of(rule)(reason, rule=rule, stage=stage, cure=_cure(self.kind, self.label))


def _cure(kind: str, label: str) -> str:
    if kind in ("lr", "hyperparameter"):
        return f"Keep it a device tensor and write in place (`{label}.fill_(value)`), or call `.invalidate()`."
    if kind == "hooks":
        return "Register hooks before the first call, or call `.invalidate()` to capture again."
    if kind in ("number", "flag", "mode"):
        return "Pass it as an argument or keep it in a device tensor, or call `.invalidate()` to capture again."
    return "Write into the old tensor with `copy_`, or call `.invalidate()` to capture again."


class Watch:
    """The facts of one graph. `dirty` is set by load hooks: the next replay looks at every fact first."""

    def __init__(self, anchors: list[Fact], facts: list[Fact], mode: str) -> None:
        self.mode = mode
        self.anchors = anchors if mode != "off" else []
        self.facts = facts if mode != "off" else []
        self.dirty = [False]

    def first_broken(self) -> Fact | None:
        """Looks at everything; None when all holds."""
        for fact in [*self.anchors, *self.facts]:
            if not fact.holds():
                return fact
        return None

    @property
    def within(self) -> int:
        """The number of replays within which every fact is looked at; 0 when nothing is watched."""
        return {"off": 0, "full": 1}.get(self.mode, max(1, EVERY * len(self.facts)))

    @property
    def promise(self) -> str:
        """How soon a change is noticed, as a sentence."""
        if self.mode == "off":
            return "nothing is watched"
        if self.mode == "full":
            return f"all {len(self.facts)} facts are looked at on every replay"
        others = len(self.facts)
        return (
            f"{len(self.anchors)} facts are looked at on every replay, each of {others} others within {self.within} "
            "replays"
        )


def watch_of(state: State, mode: str, changing: frozenset[str], grads: bool) -> Watch:
    """Reads the facts of now. `changing` are labels that the call itself changes, `grads` whether gradients keep their
    address.
    """
    anchors: list[Fact] = []
    facts: list[Fact] = []
    firsts = {next((id(p) for p in m.parameters()), 0) for m in state.found.modules.values()}
    for slot in state.slots():
        tensor = slot.get()
        if isinstance(tensor, torch.Tensor) and slot.label not in changing and (grads or slot.kind != "gradient"):
            fact = _tensor_fact(slot.get, slot.kind, slot.label, tensor)
            first = id(tensor) in firsts or slot.kind == "hyperparameter"
            (anchors if first and len(anchors) < ANCHORS else facts).append(fact)
    for plain, kind, close in _numbers(state.found):
        value = plain.look(plain.key)
        if plain.label not in changing and value == value:
            fact = Fact(
                plain.look,
                plain.key,
                value,
                int,
                0,
                "flag" if isinstance(value, bool) and kind == "number" else kind,
                plain.label,
            )
            (anchors if close and len(anchors) < ANCHORS else facts).append(fact)
    facts.extend(_modes(state.found))
    return Watch(anchors, facts, mode)


def _tensor_fact(get: Callable[[], Any], kind: str, label: str, tensor: torch.Tensor) -> Fact:
    if isinstance(get, functools.partial) and len(get.args) == 1 and not get.keywords:  # one call less per look
        return Fact(get.func, get.args[0], tensor, tensor.data_ptr, tensor.data_ptr(), kind, label)
    return Fact(lambda _: get(), None, tensor, tensor.data_ptr, tensor.data_ptr(), kind, label)


def _numbers(found: Found) -> list[tuple[Plain, str, bool]]:
    """Plain values that the code may read: (place, kind, whether it is close enough to be an anchor)."""
    out: list[tuple[Plain, str, bool]] = []
    for path, optimizer in found.optimizers.items():
        for g, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                if isinstance(value, (bool, int, float)) and name != "initial_lr":
                    kind = "lr" if name == "lr" else "number"
                    look = functools.partial(group_value, optimizer, g)
                    out.append((Plain(f"{path}.param_groups[{g}]['{name}']", look, name), kind, name == "lr"))
    out.extend((plain, "number", plain.close) for plain in found.plain)
    for path, module in found.submodules():
        out.extend((plain, "number", False) for plain in module_plain(path, module))
    return out


def _modes(found: Found) -> list[Fact]:
    """Training flags and hooks of submodules, and which parameters require grad."""
    facts = []
    for path, m in found.submodules():
        facts.append(Fact(functools.partial(getattr, m), "training", m.training, int, 0, "mode", f"{path}.training"))
        facts.append(Fact(_hooks, m, _hooks(m), int, 0, "hooks", path))
    for label, param in found.parameters():
        look = param.__getattribute__
        facts.append(Fact(look, "requires_grad", param.requires_grad, int, 0, "flag", f"{label}.requires_grad"))
    return facts


def _hooks(module: torch.nn.Module) -> int:
    """How many hooks a module and its own parameters have."""
    own = len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._backward_hooks)
    for param in module._parameters.values():
        if param is not None and param._backward_hooks:
            own += len(param._backward_hooks)
    return own


class _Loaded:
    """Told by modules and optimizers that they loaded a state; forgets the guard when it dies, and when it is
    pickled.
    """

    def __init__(self, dirty: Callable[[], None]) -> None:
        self._dirty: Any = weakref.WeakMethod(dirty)

    def __call__(self, *_: Any) -> None:
        if (dirty := self._dirty()) is not None:
            dirty()

    def __reduce__(self) -> tuple[Any, ...]:
        return (_give_nothing, ())

    def __deepcopy__(self, memo: Any) -> Any:
        return _nothing


def _nothing(*_: Any) -> None:
    """What a copied or unpickled hook does."""


def _give_nothing() -> Callable[..., None]:
    return _nothing


def hook_loads(found: Found, dirty: Callable[[], None]) -> list[Any]:
    """Asks modules and optimizers to call the method `dirty` after `load_state_dict`; gives the handles, to be removed
    on reset.
    """
    loaded = _Loaded(dirty)
    handles: list[Any] = [m.register_load_state_dict_post_hook(loaded) for m in found.modules.values()]
    handles += [o.register_load_state_dict_post_hook(loaded) for o in found.optimizers.values()]
    return handles
