"""`make_graphed_callables` and its silent holes."""

from __future__ import annotations

from collections.abc import Iterator

from graphlint.checks.base import Report, Walk, at
from graphlint.flow import events as ev
from graphlint.flow import modules
from graphlint.flow.values import (
    Closure,
    Items,
    Tensor,
    Wrapped,
    alternatives,
    tensors_in,
)


def closed_over_parameters(walk: Walk) -> Iterator[Report]:
    """A plain function is graphed whose module it reaches by closure: its parameters get no gradient."""
    for event in walk.of(ev.CallEvent):
        if (
            event.name != "torch.cuda.make_graphed_callables"
            or not event.args
            or not isinstance(event.args[0], Closure)
        ):
            continue
        capture = next(
            (
                one
                for one in walk.captures
                if one.at == event.at and one.kind == "graphed-callable" and one.frame is event.frame
            ),
            None,
        )
        if capture is None:
            continue
        trained = any(one.name.endswith(".backward") and one.clock > capture.end for one in walk.of(ev.CallEvent))
        inner = next(
            (
                one
                for one in walk.inside(capture)
                if isinstance(one, ev.CallEvent)
                and one.name.startswith("torch.nn.")
                and one.name.endswith(".forward")
                and any(t.grad for t in tensors_in(one.result))
                and not modules.is_plain(one.name[: -len(".forward")])
            ),
            None,
        )
        if inner is not None and trained:
            report = at(event, "closed-over-parameters", capture)
            report.related.append((inner.frame, inner.at, "its parameters are reached here"))
            yield report


def two_forwards(walk: Walk) -> Iterator[Report]:
    """A graphed callable runs twice before the backward of the first."""
    pending: dict[int, ev.CallEvent] = {}
    done: set[int] = set()
    suspects: dict[int, ev.CallEvent] = {}
    for event in walk.of(ev.CallEvent):
        if event.capture is not None:
            continue
        if event.name == "<graphed>.__call__":
            ident = id(event.receiver)
            if ident in pending and ident not in done:
                suspects.setdefault(ident, event)
            pending[ident] = event
        elif event.name.endswith(".backward"):
            for ident, second in suspects.items():
                done.add(ident)
                yield at(second, "two-forwards", _graphed_capture(second))
            suspects.clear()
            pending.clear()


def _graphed_capture(event: ev.CallEvent) -> ev.Capture | None:
    return event.receiver.facts.get("capture") if isinstance(event.receiver, Wrapped) else None


def graphed_hooks(walk: Walk) -> Iterator[Report]:
    """`make_graphed_callables` refuses a module that has hooks."""
    from graphlint.flow import modules

    for event in walk.of(ev.CallEvent):
        if event.name != "torch.cuda.make_graphed_callables" or not event.args:
            continue
        targets = event.args[0].values if isinstance(event.args[0], Items) else [event.args[0]]
        for target in targets:
            parts = {id(part) for part in modules.parts(target)}
            for call in walk.of(ev.CallEvent):
                if (
                    call.clock < event.clock
                    and call.name.rpartition(".")[2]
                    in ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook")
                    and id(call.receiver) in parts
                ):
                    removed = any(
                        one.receiver is call.result and one.name.endswith(".remove") and one.clock < event.clock
                        for one in walk.of(ev.CallEvent)
                    )
                    if removed:
                        continue
                    report = at(event, "graphed-hooks", value="the module")
                    report.related.append((call.frame, call.at, "the hook is registered here"))
                    yield report
                    return


def graphed_accumulation(walk: Walk) -> Iterator[Report]:
    """Backward runs twice over a graphed callable while `.grad` is the graph's own buffer."""
    for capture in (
        one for one in walk.captures if one.kind == "graphed-callable" and "transformer_engine" not in one.api
    ):
        own, runs = False, 0
        called = False
        for event in walk.events:
            if event.clock < capture.end or event.capture is not None:
                continue
            if isinstance(event, ev.WriteEvent) and event.cell.holder is walk.machine.gradients:
                own = any(isinstance(one, Tensor) for one in alternatives(event.new))
                runs = 0
            elif (
                isinstance(event, ev.InplaceEvent)
                and event.storage.owner == "grad"
                and event.name == "zero_"
                and not own
            ):
                runs = 0
            elif (
                isinstance(event, ev.CallEvent)
                and event.name == "<graphed>.__call__"
                and isinstance(event.receiver, Wrapped)
                and event.receiver.facts.get("capture") is capture
            ):
                called = True
            elif isinstance(event, ev.CallEvent) and event.name.endswith(".backward") and called:
                called = False
                runs += 1
                if runs == 2 and not own:
                    yield at(event, "graphed-grad-accumulation", capture)
                    break
            elif isinstance(event, ev.CallEvent) and event.name.endswith("zero_grad"):
                runs = 0
