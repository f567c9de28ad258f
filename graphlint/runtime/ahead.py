"""Capturing ahead: the phases of a first call without the call. Afterwards nothing has happened, and the graph stands.

One thing can't be had without the call: state that is born in it, as an optimizer's is in its first step. The graph
knows it by address and the world is without it again. So the caller's first call runs eagerly and gives birth to it
once more; its values then move into the memory that the graph knows.
"""

from __future__ import annotations

import torch

from graphlint.runtime.admit import Admission
from graphlint.runtime.found import Slot

Born = list[tuple[Slot, torch.Tensor]]


def withdraw(admission: Admission, filled: set[str]) -> Born:
    """Sets the world back to before the call; what the call bound anew stays bound to the graph's memory. Gives the
    places that were empty before, with the tensor that the graph knows there, but for those that replays fill.
    """
    bound = [(slot, tensor) for slot in admission.state.slots() if isinstance(tensor := slot.get(), torch.Tensor)]
    admission.undo()
    before = {slot.label: tensor for slot, tensor in admission.before.bindings}
    born: Born = []
    for slot, tensor in bound:
        was = before.get(slot.label)
        if was is tensor or slot.kind == "gradient" or slot.label in filled:  # bound again by each replay
            continue
        if slot.kind == "hyperparameter":
            slot.set(tensor)
        elif isinstance(was, torch.Tensor) and was.shape == tensor.shape:
            _move(slot, was, tensor)
        else:
            born.append((slot, tensor))
    return born


def adopt(born: Born) -> Born:
    """After a real call: moves what it gave birth to into the graph's memory. Gives the places that are still empty."""
    left: Born = []
    for slot, tensor in born:
        now = slot.get()
        if not isinstance(now, torch.Tensor) or now.shape != tensor.shape:
            left.append((slot, tensor))
        elif now is not tensor:
            _move(slot, now, tensor)
    return left


def _move(slot: Slot, source: torch.Tensor, target: torch.Tensor) -> None:
    with torch.inference_mode(False), torch.no_grad():
        target.copy_(source)
    slot.set(target)
