"""What a module is set to at the capture: its options, what trains, under which contexts it runs."""

from __future__ import annotations

from collections.abc import Iterator

from graphlint.checks.base import Report, Walk, at, constant, place, replayed_after
from graphlint.checks.memory import captured
from graphlint.flow import events as ev
from graphlint.flow import modules, names
from graphlint.flow.values import External, Host, Storage, Tensor, alternatives, hosts_in, tensors_in

_NO_OPTION = ("training", "weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def frozen_option(walk: Walk) -> Iterator[Report]:
    """An option of a torch module (`p`, `eps`, `momentum`) is set after a capture that ran the module."""
    for capture in captured(walk):
        ran = {
            id(event.receiver): event
            for event in reversed(walk.inside(capture))
            if isinstance(event, ev.CallEvent) and event.name.endswith(".forward")
        }
        for write in walk.of(ev.WriteEvent):
            module = write.cell.holder
            if (
                write.capture is not None
                or write.clock < capture.end
                or id(module) not in ran
                or not isinstance(module, External)
                or write.cell.key in _NO_OPTION
            ):
                continue
            if (
                not isinstance(write.new, Host)
                or write.how not in ("assign", "augment")
                or _same(module, write)
                or not replayed_after(capture, write.clock, walk)
            ):
                continue
            report = at(
                ran[id(module)], "frozen-scalar", capture, value=str(write.cell.key), where=place(write.frame, write.at)
            )
            report.related.append((write.frame, write.at, "the value changes here; the graph keeps the old one"))
            yield report
            break


def _same(module: External, write: ev.WriteEvent) -> bool:
    old = (
        write.old
        if write.old is not None
        else module.keywords.get(str(write.cell.key), module.args[0] if module.args else None)
    )
    return constant(old) is not None and constant(old) == constant(write.new)


def frozen_training(walk: Walk) -> Iterator[Report]:
    """`requires_grad_` of what a captured backward runs through: the recorded step goes on as it did."""
    for capture in captured(walk):
        backward = any(
            isinstance(event, ev.CallEvent) and event.name.endswith(".backward") for event in walk.inside(capture)
        )
        if capture.kind == "graphed-callable" or not backward:
            continue
        touched = _weights(capture, walk)
        for event in walk.of(ev.CallEvent):
            if (
                event.capture is not None
                or event.clock < capture.end
                or not event.name.endswith(".requires_grad_")
                or event.receiver is None
            ):
                continue
            if _concerned(event, touched) and replayed_after(capture, event.clock, walk):
                report = at(event, "frozen-mode", capture)
                replay = replayed_after(capture, event.clock, walk)
                if replay is not None:
                    report.related.append(
                        (replay.frame, replay.at, "the replay here trains what it trained at capture")
                    )
                yield report
                break


def _weights(capture: ev.Capture, walk: Walk) -> tuple[set[int], set[Storage]]:
    """The torch modules that ran in the region, and the parameters that it read."""
    ran = {
        id(event.receiver)
        for event in walk.inside(capture)
        if isinstance(event, ev.CallEvent) and event.name.endswith(".forward")
    }
    read = {
        one.storage
        for event in walk.inside(capture)
        if isinstance(event, ev.ReadEvent)
        for one in tensors_in(event.value)
        if one.storage.owner == "param"
    }
    return ran, read


def _concerned(event: ev.CallEvent, touched: tuple[set[int], set[Storage]]) -> bool:
    ran, read = touched
    if isinstance(event.receiver, Tensor):
        return event.receiver.storage in read
    return event.receiver is not None and any(id(part) in ran for part in modules.parts(event.receiver))


def frozen_environment(walk: Walk) -> Iterator[Report]:
    """An environment variable is read in a region for a number, and written between replays."""
    writes = [
        event
        for event in walk.of(ev.CallEvent)
        if event.name in ("set os.environ[]", "os.putenv", "os.environ.update", "os.environ.setdefault", "os.unsetenv")
    ]
    for capture in captured(walk):
        write = next(
            (
                event
                for event in writes
                if event.capture is None and event.clock > capture.end and replayed_after(capture, event.clock, walk)
            ),
            None,
        )
        used = any(
            "env" in host.marks
            for event in walk.inside(capture)
            if isinstance(event, ev.OpEvent)
            for value in event.operands
            for host in hosts_in(value)
        )
        if write is None or not used:
            continue
        read = next(
            (
                event
                for event in walk.inside(capture)
                if isinstance(event, ev.CallEvent) and event.name in ("os.environ.get", "os.getenv")
            ),
            None,
        )
        if read is not None:
            report = at(read, "frozen-clock", why="reads the environment once")
            report.related.append((write.frame, write.at, "the variable is written here, between replays"))
            yield report


def autocast_around(walk: Walk) -> Iterator[Report]:
    """A region under an autocast that was entered outside, behind a warm-up in it: the graph reads cast weights that no
    update reaches."""
    for capture in captured(walk):
        if not capture.autocast or not walk.replays(capture):
            continue
        inside = [
            event
            for event in walk.inside(capture)
            if isinstance(event, ev.CallEvent) and event.name.endswith(".forward") and event.receiver is not None
        ]
        for event in inside:
            warmed = any(
                one.receiver is event.receiver
                and one.name == event.name
                and capture.autocast < one.clock < capture.begin
                for one in walk.of(ev.CallEvent)
            )
            change = _updated(event, capture, walk) if warmed else None
            if change is not None:
                report = Report(
                    "frozen-mode", capture.frame, capture.at, capture, {"value": "the autocast around the capture"}
                )
                report.related.append(
                    (
                        change.frame,
                        change.at,
                        "the weight is written here; the graph reads the copy that autocast made before the capture",
                    )
                )
                yield report
                break


def _updated(forward: ev.CallEvent, capture: ev.Capture, walk: Walk) -> ev.InplaceEvent | None:
    """Where a parameter of the module is written between the capture and a replay."""
    module = forward.receiver
    own = {
        one.storage
        for value in getattr(module, "slots", {}).values()
        for one in alternatives(value)
        if isinstance(one, Tensor) and one.storage.owner == "param"
    }
    for event in walk.of(ev.InplaceEvent):
        if (
            event.storage in own
            and event.capture is None
            and event.clock > capture.end
            and replayed_after(capture, event.clock, walk)
        ):
            return event
    return None


def capture_aware_arithmetic(walk: Walk) -> Iterator[Report]:
    """A branch on `is_current_stream_capturing()` whose two sides compute differently, though the eager side could be
    captured as well."""
    seen: set[int] = set()
    for test in walk.direct(ev.TestEvent):
        if (
            test.how not in ("if", "ternary")
            or test.capture is None
            or id(test.frame.func) in seen
            or not _asks_capturing(test)
            or not walk.replays(test.capture)
        ):
            continue
        eager = next(
            (
                one
                for one in walk.of(ev.TestEvent)
                if one.capture is None and one.at == test.at and one.frame.func is test.frame.func
            ),
            None,
        )
        if eager is None:
            continue
        captured_side, eager_side = _arithmetic(test, walk), _arithmetic(eager, walk)
        if (
            captured_side
            and eager_side
            and not set(captured_side) <= set(eager_side)
            and not set(eager_side) <= set(captured_side)
        ):
            seen.add(id(test.frame.func))
            report = at(test, "frozen-flag", value="is_current_stream_capturing()", where=place(eager.frame, eager.at))
            report.related.append(
                (eager.frame, eager.at, "eager calls, the warm-up too, take the other side and compute something else")
            )
            yield report


def _asks_capturing(test: ev.TestEvent) -> bool:
    return any(isinstance(one, Host) and "capturing" in one.marks for one in alternatives(test.value))


def _arithmetic(test: ev.TestEvent, walk: Walk) -> list[str] | None:
    """What the function computes behind the test, by the names of torch; None where it does what a capture could not,
    or what is not known."""
    found: list[str] = []
    for event in walk.after(test.clock):
        if event.frame is not test.frame:
            if event.frame.depth <= test.frame.depth:
                break
            return None
        if isinstance(event, ev.OpEvent):
            found.append(event.op)
        elif isinstance(event, ev.CallEvent):
            last = event.name.rpartition(".")[2]
            if (
                not event.name.startswith("torch.")
                or last in _UNCAPTURABLE
                or event.name.startswith(("torch.cuda.", "torch.distributed.", "torch.ops."))
            ):
                return None
            if last not in names.VIEWS | names.FACTORIES | names.LIKE | names.HOST_METHODS | {
                "clone",
                "copy_",
                "fill_",
                "zero_",
            }:
                found.append(last)
        elif isinstance(event, (ev.FormatEvent, ev.CompareEvent)) or (
            isinstance(event, ev.IndexEvent) and tensors_in(event.index)
        ):
            return None
    return sorted(found)


_UNCAPTURABLE = (
    "item",
    "tolist",
    "cpu",
    "numpy",
    "nonzero",
    "unique",
    "masked_select",
    "all",
    "any",
    "equal",
    "allclose",
    "isnan",
    "isfinite",
    "isinf",
    "to",
    "where",
)


_MODE_MATTERS = (
    "Dropout",
    "BatchNorm",
    "RReLU",
    "InstanceNorm",
    "LSTM",
    "GRU",
    "RNN",
    "MultiheadAttention",
    "TransformerEncoderLayer",
    "TransformerDecoderLayer",
    "SyncBatchNorm",
)


def frozen_mode(walk: Walk) -> Iterator[Report]:
    """`.eval()` or `.train()` after a capture whose layers depend on the mode."""
    for capture in walk.captures:
        if capture.kind in ("compile",) or "guarded" in capture.tags:
            continue
        replays = walk.replays(capture)
        if not replays:
            continue
        touched = [
            event.receiver
            for event in walk.inside(capture)
            if isinstance(event, ev.CallEvent)
            and event.name.endswith(".forward")
            and isinstance(event.receiver, External)
        ]
        sensitive = [one for one in touched if any(mark in one.name for mark in _MODE_MATTERS)]
        for module in sensitive:
            yield from _mode_at_replay(module, capture, replays, walk)
            break


def _mode_at_replay(
    module: External, capture: ev.Capture, replays: list[ev.ReplayEvent], walk: Walk
) -> Iterator[Report]:
    writes = [event for event in walk.of(ev.WriteEvent) if event.how == "mode" and event.cell.holder is module]
    before = [event for event in writes if event.clock < capture.begin]
    held = before[-1].new if before else None
    for replay in replays:
        now = [event for event in writes if capture.end < event.clock < replay.clock]
        if not now or any(one.at == capture.at and now[-1].clock < one.begin < replay.clock for one in walk.captures):
            continue  # a graph was captured for the new mode; this one is kept for its own
        new = now[-1].new
        old_value = (
            held.value if isinstance(held, Host) and held.known else (True if held is None and walk.whole else None)
        )
        if isinstance(new, Host) and new.known and old_value is not None and new.value != old_value:
            report = at(now[-1], "frozen-mode", capture)
            report.related.append((replay.frame, replay.at, "the replay here still runs in the mode of the capture"))
            yield report
            return
