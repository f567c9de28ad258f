"""Writes the fast path of one graph: the order of its steps, and the parts that know the captured call. The parts that
do not are `hotpath.py`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from graphlint.runtime.backend import Copies, GraphBackend
from graphlint.runtime.hotpath import (
    MISS,
    Source,
    holders,
    is_native,
    tensor_check,
    write_context,
    write_outputs,
    write_plain,
    write_route,
    write_structure,
    write_training,
    write_watch,
)
from graphlint.runtime.inputs import collapsed, span
from graphlint.runtime.lending import Holders, Lending, autograd_uses, caller, nobody, storage_uses
from graphlint.runtime.replay import Captured, Shared, bind
from graphlint.runtime.spec import Spec, TensorSpec, unflatten

_CACHED_LENGTHS = 4096
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)  # other classes may keep their memory elsewhere
SINGLE_OUTPUTS = 4  # results whose holders are counted one by one on each replay; those of later ones in one sum


def build_hot(
    captured: Captured,
    leaves: list[Any],
    shared: Shared,
    backend: GraphBackend,
    broken: Callable[[Any, Any, Any], Any],
    kept: Callable[[Captured, Any, Any], Any],
    route: Callable[[int], Callable[[Any, Any], Any] | None],
    key: tuple[Callable[..., Any], Any] | None = None,
    own_only: bool = False,
) -> Callable[[Any, Any], Any]:
    """Generates the replay function of one graph.

    Args:
        leaves: those of a call that it serves.
        broken, kept, route: where a failed fact, a kept output and a call of another bucket go.
        key: the user's key function and the value it must give.
        own_only: serve only calls that pass the graph's own buffers.
    """
    out = Source()
    spec, static = captured.spec, captured.static
    out.constants.update(
        MISS=MISS,
        busy=shared.busy,
        capturing=backend.capturing_now,
        take=shared.turn.take,
        give=shared.turn.give,
        wait=shared.turn.wait,
        copy=torch._foreach_copy_,
        replay=captured.graph.replay,
        count=captured.replays,
        last=shared.last_stream,
        follow=shared.follow,
    )
    stream_id = _spelled(out, shared.stream_id, "stream_id")
    # in somebody else's capture the body becomes part of that graph, which must not write into this one's buffers
    out.add("if busy[0] or capturing(): return MISS")
    names = write_structure(out, spec)
    write_plain(out, spec, names, static.leaves)
    check = _tensor_check(captured, leaves)
    other = write_context(out, spec, backend.device_type, check is not None and is_native(check))
    write_training(out, captured.roots)
    if key is not None:
        out.constants["user_key"] = key[0]
        out.add(f"if user_key(*args, **kwargs) != {out.constant(key[1])}: return MISS")
    if static.plan is not None:
        write_route(out, static.plan, static.size, names, route)
    out.add("try: token = take()")
    out.add("except IndexError:")
    out.add("    token = wait()")
    out.add("    if not token: return MISS")
    out.add("try:")
    out.depth += 1
    _write_entry(out, captured)
    write_watch(out, captured.watch, broken)
    out.add(f"if {stream_id} != last[0]: follow({stream_id})")  # before the copy: a replay may still read the inputs
    copies = _copies(captured, leaves, backend, shared) if not own_only else None
    _write_copy(out, captured, names, check, own_only, other, copies)
    result = _write_kept(out, captured, kept)
    out.add("replay()")
    out.add("count[0] += 1")
    _write_after(out, captured, names)
    out.add(f"return {result(names)}")
    out.depth -= 1
    out.add("finally: give(token)")
    function = out.build()
    _count_holders(captured, function)
    captured.source = function.__doc__ or ""
    return function


def _spelled(out: Source, call: Callable[[], Any], name: str) -> str:
    """The expression of a call without arguments; a partial is taken apart, which saves a call."""
    if isinstance(call, functools.partial) and len(call.args) == 1 and not call.keywords:
        out.constants[name] = call.func
        return f"{name}({out.constant(call.args[0])})"
    out.constants[name] = call
    return f"{name}()"


def _write_entry(out: Source, captured: Captured) -> None:
    """Gradients must be as they were when the captured call began."""
    if captured.entry == "any" or not captured.grads:
        return
    out.constants["probe"], out.constants["grad0"] = captured.grads[0]
    out.add(
        "if probe.grad is not None: return MISS"
        if captured.entry == "none"
        else "if probe.grad is not grad0: return MISS"
    )


def _tensor_check(captured: Captured, leaves: list[Any]) -> Callable[..., bool] | None:
    """The check of all tensor arguments at once; None when there are none."""
    spec, static = captured.spec, captured.static
    if not static.unique:
        return None
    free = static.plan.dims if static.plan else {}
    specs = [leaf for i in static.unique if isinstance(leaf := spec.leaves[i], TensorSpec)]
    dynamic = {at: free[i] for at, i in enumerate(static.unique) if i in free}
    return tensor_check([leaves[i] for i in static.unique], specs, dynamic)


def _write_copy(
    out: Source,
    captured: Captured,
    names: list[str],
    check: Callable[..., bool] | None,
    own_only: bool,
    other: str,
    copies: Copies | None,
) -> None:
    """Checks all tensors at once and copies them in one grouped call; the graph's own buffers need neither."""
    spec, static = captured.spec, captured.static
    for i in spec.tensor_indices:
        if spec.aliases[i] != i:
            out.add(f"if {names[i]} is not {names[spec.aliases[i]]}: return MISS")
    if check is None:
        return
    unique = [names[i] for i in static.unique]
    whole = names == [f"args[{i}]" for i in range(len(names))]
    given = "*args" if whole and unique == names else ", ".join(unique)
    out.constants["check"] = check
    if static.plan is not None:
        out.add(f"if not check({given}): return MISS")
        _write_padded(out, captured, names)
        return
    buffers = [out.constant(static.leaves[i], "s") for i in static.unique]
    same = " and ".join(f"{name} is {buffer}" for name, buffer in zip(unique, buffers, strict=True))
    out.add(f"if {same}:")
    out.add(f"    if {other or 'False'}: return MISS")
    if own_only:
        out.add("else: return MISS")
        return
    out.add(f"elif not check({given}): return MISS")
    if static.copied:
        sources = [_source(out, spec, names, i) for i in static.copied]
        targets = out.constant(tuple(static.targets), "targets")
        call = f"copy({targets}, {'args' if whole and sources == names else '(' + ', '.join(sources) + ',)'})"
        if copies is None:
            out.add(f"else: {call}")
            return
        out.constants.update(pack=copies.pack, block=copies.block, launch=copies.launch)
        addresses = ", ".join(f"{names[i]}.data_ptr()" for i in static.copied)
        out.add("else:")
        out.add(f"    pack(block, {copies.at}, {addresses})")
        out.add(f"    if launch(): {call}")


def _copies(captured: Captured, leaves: list[Any], backend: GraphBackend, shared: Shared) -> Copies | None:
    """The grouped copy by addresses, where every input is plain memory that lies as its buffer does."""
    spec, static = captured.spec, captured.static
    given = [leaves[i] for i in static.copied]
    plain = all(type(x) in _PLAIN and not (x.is_conj() or x.is_neg() or x.is_quantized) for x in given)
    if static.plan is not None or not given or not plain:
        return None
    specs = [leaf for i in static.copied if isinstance(leaf := spec.leaves[i], TensorSpec)]
    sizes = [span(leaf) * x.element_size() for leaf, x in zip(specs, given, strict=True)]
    if sum(sizes) > 2 * sum(target.numel() * target.element_size() for target in static.targets):
        return None  # mostly gaps between the elements
    addresses = [target.data_ptr() for target in static.targets]
    return backend.copies(specs[0].device, addresses, sizes, shared.pointer)


def _source(out: Source, spec: Spec, names: list[str], i: int) -> str:
    leaf = spec.leaves[i]
    assert isinstance(leaf, TensorSpec)
    index = collapsed(leaf)
    text = f"{names[i]}.detach()" if leaf.requires_grad else names[i]
    return text if index is None else f"{text}[{out.constant(index, 'index')}]"


def _write_padded(out: Source, captured: Captured, names: list[str]) -> None:
    """Copies into cached views of the buffers; the tail is refilled only where an earlier call was longer."""
    static = captured.static
    out.constants.update(plans={}, plan_of=_padded_plan(captured), static=static)
    out.add("plan = plans.get(n) or plan_of(plans, n)")
    out.add(f"copy(plan, ({', '.join(names[i] for i in static.copied)},))")
    out.add("if static.filled > n: pad(n)")
    out.add("static.filled = n")

    def pad(length: int) -> None:
        assert static.plan is not None
        for i in static.copied:
            if (dim := static.plan.dims.get(i)) is not None:
                tail = static.leaves[i].detach().narrow(dim, length, static.filled - length)
                tail.fill_(static.plan.pads.get(i, 0))

    out.constants["pad"] = pad


def _padded_plan(captured: Captured) -> Callable[[dict[int, Any], int], Any]:
    static = captured.static
    plan = static.plan
    assert plan is not None

    def make(plans: dict[int, Any], length: int) -> Any:
        if len(plans) >= _CACHED_LENGTHS:
            plans.clear()
        views = tuple(
            static.leaves[i].detach().narrow(plan.dims[i], 0, length) if i in plan.dims else static.leaves[i].detach()
            for i in static.copied
        )
        plans[length] = views
        return views

    return make


def _write_kept(
    out: Source, captured: Captured, kept: Callable[[Captured, Any, Any], Any]
) -> Callable[[list[str]], str]:
    """Names the outputs, and notices before the launch that the caller still holds the last result where it did not
    let go of one before.
    """
    own = {id(captured.static.leaves[i]): i for i in captured.static.unique}
    labels = [f"o{i}" for i in range(len(captured.outputs))]
    for label, value in zip(labels, captured.outputs, strict=True):
        out.constants[label] = value
    cut = captured.static.plan is not None and bool(captured.unpad.dims)
    lending = captured.lending
    if lending is not None and lending.fresh and captured.watch.mode != "off":
        out.constants.update(refs=sys.getrefcount, uses=storage_uses, kept=kept, mine=captured)
        if cut:
            out.constants.update(holders=captured.holders)
            out.add("held = holders()[0]")
            _write_lent(out, lending, [("held", "0", 1)], routed=True)
        else:
            counts = _spell_counts(out, captured, lending.fresh)
            _write_lent(out, lending, counts, routed=captured.static.plan is not None)

    def result(names: list[str]) -> str:
        parts = [
            names[own[id(v)]] if id(v) in own else label for label, v in zip(labels, captured.outputs, strict=True)
        ]
        if (
            cut
            or isinstance(captured.outputs_mode, int)
            or (captured.outputs_mode == "clone" and len(captured.tensors) > 3)
        ):
            out.constants.update(hand_out=captured.hand_out, results=captured.results)
            return f"hand_out(results([{', '.join(names)}]))"
        if captured.outputs_mode == "clone":
            parts = [f"{p}.clone()" if i in captured.tensors and p == labels[i] else p for i, p in enumerate(parts)]
        return write_outputs(out, captured.tree, parts, lambda leaves: unflatten(captured.tree, leaves))

    return result


def _spell_counts(out: Source, captured: Captured, fresh: list[int]) -> list[tuple[str, str, int]]:
    """For each output the expression that counts its holders, the name of how many are the graph's own, and how many
    more there may be where one is allowed; the later outputs are counted in one sum.
    """
    outputs = captured.outputs
    for i in fresh:
        out.constants[f"s{i}"] = outputs[i].untyped_storage()  # keeps the address valid
        out.constants[f"c{i}"] = out.constants[f"s{i}"]._cdata
    single, rest = fresh[:SINGLE_OUTPUTS], fresh[SINGLE_OUTPUTS:]
    counts = [f"refs(o{i}) + uses(c{i})" for i in single]
    if autograd_uses is not nobody:
        out.constants.update({f"saved{i}": functools.partial(autograd_uses, outputs[i]) for i in single})
        counts = [f"{count} + saved{i}()" for count, i in zip(counts, single, strict=True)]
    spelled = [(count, f"b{i}", 1) for count, i in zip(counts, single, strict=True)]
    if rest:
        out.constants.update(rest=tuple(outputs[i] for i in rest), stores=tuple(out.constants[f"c{i}"] for i in rest))
        also = ""
        if autograd_uses is not nobody:
            out.constants["saved"] = autograd_uses
            also = " + sum(map(saved, rest))"
        spelled.append((f"sum(map(refs, rest)) + sum(map(uses, stores)){also}", "brest", len(rest)))
    return spelled


def _write_lent(out: Source, lending: Lending, counts: list[tuple[str, str, int]], routed: bool) -> None:
    """Compares the holders of each result with those of the graph itself; one more is allowed at the known places."""
    held = " or ".join(f"{count} > {base}" for count, base, _ in counts)
    if not lending.allowed:
        out.add(f"if {held}: return kept(mine, args, kwargs)")
        return
    out.constants.update(frame_at=sys._getframe, caller=caller, places=lending.places, beyond=lending.beyond)
    many = " or ".join(f"{count} > {base} + {more}" for count, base, more in counts)
    out.add(f"if {held}:")
    out.add(f"    frame = {'caller()' if routed else 'frame_at(1)'}")
    if not routed:
        out.add("    frame = frame.f_back or frame")  # autograd calls from a thread without Python below
    out.add("    back = frame.f_back")
    out.add("    if places.get(frame.f_lasti) is not frame.f_code: return kept(mine, args, kwargs)")
    out.add("    if beyond.get(back and back.f_lasti) is not (back and back.f_code): return kept(mine, args, kwargs)")
    out.add(f"    if {many}: return kept(mine, args, kwargs)")


def _count_holders(captured: Captured, function: Callable[..., Any]) -> None:
    """Tells a new fast path how many names and views of each output are the graph's own: counted for the first one,
    when the caller has copies only.
    """
    lending = captured.lending
    if lending is None or "mine" not in function.__globals__:
        return
    space = function.__globals__
    for at, i in enumerate(lending.fresh):
        now, late = captured.count(i), at >= SINGLE_OUTPUTS and "rest" in space
        hot = holders(function, f"o{i}") + autograd_uses(captured.outputs[i]) + now.views
        base = lending.base.setdefault(i, Holders(now.names, now.views, hot, 2 if late else 1))
        space[f"b{i}"] = base.hot
    if "rest" in space:
        rest = space["rest"]
        if lending.late < 0:
            lending.late = sum(map(sys.getrefcount, rest)) + sum(map(storage_uses, space["stores"]))
            lending.late += sum(map(autograd_uses, rest))
        space["brest"] = lending.late


def _write_after(out: Source, captured: Captured, names: list[str]) -> None:
    if captured.grads:
        out.constants.update(bind_grads=captured.bind_grads)
        out.constants["probe"], out.constants["grad0"] = captured.grads[0]
        out.add("if probe.grad is not grad0: bind_grads()")
    if captured.bound:
        out.constants.update(bind=bind, bound=captured.bound)
        out.add("bind(bound)")
    if captured.written:
        out.constants["write_back"] = captured.write_back
        out.add(f"write_back([{', '.join(names)}])")
