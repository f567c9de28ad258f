"""A real call with real new inputs, run eagerly and by replay from the same state: the last stage of verification.

The guard can vary floating-point inputs by itself, but not integers, which may be indices. The caller's next calls do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from graphlint.runtime.backend import GraphBackend
from graphlint.runtime.calls import Call
from graphlint.runtime.compare import Before, copies, difference
from graphlint.runtime.errors import Where, error_of
from graphlint.runtime.replay import Captured
from graphlint.runtime.report import Proof
from graphlint.runtime.results import host_difference
from graphlint.runtime.spec import flatten, unflatten_call
from graphlint.runtime.state import Snapshot, State
from graphlint.runtime.verify import private, state_before

SHADOW_CALLS = 2


def shadow(
    fn: Callable[..., Any],
    captured: Captured,
    call: Call,
    state: State,
    backend: GraphBackend,
    stream: Any,
    where: Where | None,
) -> list[Any]:
    """Runs the call both ways; the replay's effects stay. Gives the output leaves.

    Raises:
        CaptureError: they differ. The state and the arguments are then as before the call, as they are when the
            function itself raises or is interrupted.
    """
    start = state.snapshot(backend.free_bytes(state.device))
    kept = [(call.leaves[i], call.leaves[i].detach().clone()) for i in captured.written]
    try:
        return _both(fn, captured, call, state, start, backend, stream, where)
    except BaseException:
        start.restore()
        with torch.no_grad():
            for leaf, before in kept:
                leaf.copy_(before)
        raise


def _both(
    fn: Callable[..., Any],
    captured: Captured,
    call: Call,
    state: State,
    start: Snapshot,
    backend: GraphBackend,
    stream: Any,
    where: Where | None,
) -> list[Any]:
    """Eager, then the replay from the same state; raises where they differ."""
    mine = private(call.leaves, call.spec, captured.written)
    args, kwargs = unflatten_call(call.spec.tree, mine)
    with backend.on_stream(stream):
        outputs, tree, _ = flatten(fn(*args, **kwargs))
    want = copies(_values(captured, outputs, mine, state))
    start.restore()
    results = captured.run(call.leaves)
    have = copies(_values(captured, results, call.leaves, state))
    tolerance = captured.tolerance if _was_bitwise(captured) else replace(captured.tolerance, exact=False)
    first, same = difference(want, have, {}, tolerance, functools.partial(_before, start, state, captured, call))
    if first is not None:
        rule = "replay-mismatch" if captured.static.plan is None else "padding-changes-result"
        raise error_of(rule)(f"on fresh inputs {first}", rule=rule, stage="verify", where=where)
    frozen = host_difference(outputs, results)
    if tree != captured.tree:
        frozen = "the result is nested otherwise: eager takes another way than at capture"
    if frozen:
        raise error_of("frozen-scalar")(f"on fresh inputs {frozen}", rule="frozen-scalar", stage="verify", where=where)
    captured.shadows -= 1
    if not captured.shadows:
        how = "bitwise" if same else tolerance.words
        captured.report.proofs.append(Proof("fresh inputs", "proved", f"{SHADOW_CALLS} real calls equal eager, {how}"))
    return results


def _values(captured: Captured, outputs: list[Any], leaves: list[Any], state: State) -> dict[str, torch.Tensor]:
    """Everything that is compared, by label: results, arguments that the call changes, state on the device."""
    named = {f"output[{i}]": o for i, o in enumerate(outputs) if isinstance(o, torch.Tensor)}
    named |= {f"argument {captured.spec.names[i]}": leaves[i] for i in captured.written}
    return named | {label: tensor for label, tensor in state.tensors().items() if tensor.device == state.device}


def _before(start: Snapshot, state: State, captured: Captured, call: Call) -> Before:
    """The state before the call; the replay's effects are put back, for they stay."""
    after = state.snapshot(0)
    written = {i: call.leaves[i].detach().clone() for i in captured.written}
    before = state_before(start, state)
    after.restore()
    for i, value in written.items():
        call.leaves[i].detach().copy_(value)
    return before


def _was_bitwise(captured: Captured) -> bool:
    return any("bitwise" in proof.text for proof in captured.report.proofs)
