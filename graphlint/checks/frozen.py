"""Host values that a capture freezes, and that change afterwards: both places are named, or nothing is said."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from graphlint import ir
from graphlint.checks.base import Report, Walk, at, cell_name, place
from graphlint.checks.steps import option, stepped
from graphlint.flow import events as ev
from graphlint.flow import modules
from graphlint.flow.values import Cell, External, Host, Instance, Items, Mapping, Scope, Storage, Tensor, Value, alternatives, hosts_in
from graphlint.link import inner

MODES = "training"
LENGTHS = ("max_seqlen", "max_seq_len", "max_q", "max_k", "max_s")
# calls that look at host values without putting them into a kernel
_HARMLESS = ("builtins.", "logging.", "torch.cuda.nvtx", "torch.profiler", "torch._assert", "warnings.", "?")


def frozen_value(walk: Walk) -> Iterator[Report]:
    """A number or flag read in a capture is written later, and the graph is replayed without being captured anew."""
    changes = _changes(walk)
    if not changes:
        return
    seen: set[tuple[int, int, int]] = set()
    for event in walk.events:
        capture = event.capture
        if capture is None or capture.kind in ("compile", "warp") or "guarded" in capture.tags:
            continue
        for host, rule in _uses(event):
            for cell in host.origins:
                change = _later(cell, host, capture, changes, walk)
                key = (id(event.frame.module), event.at[0], event.at[1])
                if change is None or key in seen:
                    continue
                seen.add(key)
                yield _frozen(event, rule, cell, change)


def _frozen(event: ev.Event, rule: str, cell: Cell, change: ev.WriteEvent) -> Report:
    if cell.key == MODES and modules.is_module(cell.holder):
        rule = "frozen-flag" if isinstance(event, ev.TestEvent) else "frozen-mode"
    report = at(event, rule, where=place(change.frame, change.at), value=cell_name(cell).lstrip("."))
    report.related.append((change.frame, change.at, "the value changes here; the graph keeps the old one"))
    return report


def _changes(walk: Walk) -> dict[Cell, list[ev.WriteEvent]]:
    """Writes outside captures, after the first capture."""
    if not walk.captures:
        return {}
    first = min(capture.end or capture.begin for capture in walk.captures)
    found: dict[Cell, list[ev.WriteEvent]] = {}
    for event in walk.of(ev.WriteEvent):
        if event.capture is None and event.clock > first and event.how not in ("register", "loop", "del"):
            found.setdefault(event.cell, []).append(event)
    return found


def _uses(event: ev.Event) -> Iterator[tuple[Host, str]]:
    """The host values that this event puts into the graph, and the rule that speaks of such a use."""
    if isinstance(event, ev.TestEvent):
        for one in alternatives(event.value):
            if isinstance(one, Host) and event.differs:
                yield one, "frozen-flag"
    elif isinstance(event, ev.OpEvent):
        for operand in event.operands:
            for one in alternatives(operand):
                if isinstance(one, Host):
                    yield one, "frozen-scalar"
    elif isinstance(event, ev.IndexEvent):
        if any(isinstance(one, Tensor) for one in alternatives(event.obj)):
            yield from ((one, "frozen-scalar") for one in _in_index(event.index))
    elif isinstance(event, ev.CallEvent) and event.name.startswith(("torch.", "flash_attn", "xformers", "transformer_engine")) and ".optim." not in event.name:
        for name, value in (*(("", one) for one in event.args), *event.keywords.items()):
            rule = "frozen-max-seqlen" if name.startswith(LENGTHS) else "frozen-scalar"
            yield from ((one, rule) for one in hosts_in(value) if one.kind not in ("device", "dtype", "str", "none"))
    elif isinstance(event, ev.LoopEvent) and isinstance(event.value, External) and event.value.name == "range":
        yield from ((one, "frozen-scalar") for one in event.value.args if isinstance(one, Host))


def _in_index(index: Value) -> list[Host]:
    found: list[Host] = []
    for part in index.values if isinstance(index, Items) else [index]:
        if isinstance(part, External) and part.name == "slice":
            found.extend(one for arg in part.args for one in hosts_in(arg))
        elif isinstance(part, Host):
            found.append(part)
    return found


def _later(cell: Cell, host: Host, capture: ev.Capture, changes: dict[Cell, list[ev.WriteEvent]], walk: Walk) -> ev.WriteEvent | None:
    """The first write after the capture that gives the cell another value, with a replay behind it."""
    if _written_inside(cell, capture, walk):
        return None  # the region sets the value itself
    for change in changes.get(cell, ()):
        if change.clock < capture.end or not _differs(change):
            continue
        if isinstance(cell.holder, Scope) and cell.holder.outer is not None and change.frame.scope is not cell.holder and change.how == "assign":
            continue
        if _stale_after(change, capture, walk):
            return change
    return None


def _written_inside(cell: Cell, capture: ev.Capture, walk: Walk) -> bool:
    return any(event.capture is capture and event.cell == cell for event in walk.of(ev.WriteEvent))


def _differs(change: ev.WriteEvent) -> bool:
    old, new = change.old, change.new
    if old is new or not any(isinstance(one, Host) for one in alternatives(new)):
        return False
    if isinstance(old, Host) and isinstance(new, Host) and old.known and new.known:
        return bool(old.value != new.value or type(old.value) is not type(new.value))
    return True


def _stale_after(change: ev.WriteEvent, capture: ev.Capture, walk: Walk) -> bool:
    """Whether the graph of this capture still runs after the change."""
    if any(event.clock > change.clock for event in walk.replays(capture)):
        return True
    if walk.whole:
        return False
    # a class seen by itself: its methods are called in any order, unless the change comes with a new capture or drops the graph
    again = [one for one in walk.captures if one is not capture and one.at == capture.at and one.frame.module is capture.frame.module and one.begin > change.clock]
    dropped = any(isinstance(event, ev.WriteEvent) and event.frame is change.frame and event.old is capture.graph and capture.graph is not None for event in walk.of(ev.WriteEvent))
    return not again and not dropped and bool(walk.replays(capture)) and walk.kept(capture) and change.frame.name.rpartition(".")[2] not in ("__init__", "reset", "setup", "initialize")


# --- optimizers ------------------------------------------------------------------------------------------------------


def frozen_lr(walk: Walk) -> Iterator[Report]:
    """A captured optimizer step with the learning rate as a Python number, and something that changes the rate."""
    for event in walk.of(ev.CallEvent):
        optimizer = stepped(event)
        capture = event.capture
        if optimizer is None or capture is None or "guarded" in capture.tags:
            continue
        rate = option(optimizer, "lr")
        if rate is not None and any(isinstance(one, Tensor) for one in alternatives(rate)):
            yield from _host_rate(event, optimizer, rate, capture, walk)
            continue
        change = _rate_change(optimizer, capture, walk)
        if change is not None:
            report = at(event, "frozen-lr", where=place(change.frame, change.at), value="lr")
            report.related.append((change.frame, change.at, "the learning rate changes here"))
            yield report


def _rate_change(optimizer: External, capture: ev.Capture, walk: Walk) -> ev.Event | None:
    """A scheduler of this optimizer that steps, or a write to its groups, between the capture and a replay."""
    last = max((event.clock for event in walk.replays(capture)), default=0)
    groups = optimizer.slots.get("param_groups")
    holders = [group for group in (groups.values if isinstance(groups, Items) else []) if isinstance(group, Mapping)]
    for event in walk.events:
        if event.capture is not None or not capture.end < event.clock or (walk.whole and event.clock > last):
            continue
        if isinstance(event, ev.CallEvent) and event.name.startswith("torch.optim.lr_scheduler.") and event.name.endswith(".step"):
            scheduler = event.receiver
            if isinstance(scheduler, External) and (optimizer in scheduler.args or optimizer in scheduler.keywords.values()):
                return event
        if isinstance(event, ev.WriteEvent) and event.cell.key == "lr" and any(event.cell.holder is group for group in holders) and not isinstance(event.new, Tensor):
            return event
    return None


def _host_rate(event: ev.CallEvent, optimizer: External, rate: Value, capture: ev.Capture, walk: Walk) -> Iterator[Report]:
    """The rate is a tensor: on the CPU it is frozen; one tensor for several groups collapses per-group schedules."""
    change = _rate_change(optimizer, capture, walk)
    tensor = next(one for one in alternatives(rate) if isinstance(one, Tensor))
    if tensor.on_host:
        change = change or _inplace_after(tensor.storage, capture, walk)
        if change is not None:
            report = at(event, "frozen-lr", where=place(change.frame, change.at), value="lr")
            report.related.append((change.frame, change.at, "the learning rate changes here, in a CPU tensor whose number the graph has baked in"))
            yield report
        return
    groups = optimizer.slots.get("param_groups")
    rates = [group.slots.get("lr") for group in (groups.values if isinstance(groups, Items) else []) if isinstance(group, Mapping)]
    shared = len(rates) > 1 and all(isinstance(one, Tensor) and one.storage is tensor.storage for one in rates)
    if shared and change is not None:
        made = next((one for one in walk.of(ev.CallEvent) if one.result is optimizer), event)
        report = Report("shared-lr-tensor", made.frame, made.at, capture, {"value": "lr", "where": place(change.frame, change.at)})
        report.related.append((change.frame, change.at, "the rates are set per group here"))
        yield report


def _inplace_after(storage: Storage, capture: ev.Capture, walk: Walk) -> ev.Event | None:
    last = max((event.clock for event in walk.replays(capture)), default=0)
    return next((event for event in walk.of(ev.InplaceEvent) if event.storage is storage and event.capture is None and capture.end < event.clock < last), None)


def cpu_scalar(walk: Walk) -> Iterator[Report]:
    """A 0-dim CPU tensor used with device tensors in a capture, and written later."""
    seen: set[int] = set()
    for event in walk.events:
        capture = event.capture
        if capture is None or capture.kind == "compile" or "guarded" in capture.tags or not isinstance(event, (ev.OpEvent, ev.CallEvent)):
            continue
        values = event.operands if isinstance(event, ev.OpEvent) else ((*event.args, *event.keywords.values()) if event.name.startswith("torch.") else ())
        mixed = any(isinstance(one, Tensor) and not one.on_host for value in values for one in alternatives(value)) or isinstance(event, ev.CallEvent) and isinstance(event.receiver, Tensor)
        for value in values:
            for one in alternatives(value):
                if not (isinstance(one, Tensor) and one.on_host and one.rank == 0 and mixed) or id(one.storage) in seen or one.storage.born > capture.begin:
                    continue
                change = _inplace_after(one.storage, capture, walk) or _rebound_after(one.storage, capture, walk)
                if change is not None:
                    seen.add(id(one.storage))
                    report = at(event, "cpu-scalar-tensor", where=place(change.frame, change.at))
                    report.words["value"] = _name_of(one.storage)
                    report.related.append((change.frame, change.at, "the value changes here"))
                    yield report


def _name_of(storage: Storage) -> str:
    return cell_name(storage.cell).lstrip(".") if storage.cell is not None else ""


def _rebound_after(storage: Storage, capture: ev.Capture, walk: Walk) -> ev.Event | None:
    last = max((event.clock for event in walk.replays(capture)), default=0)
    for event in walk.of(ev.WriteEvent):
        if event.capture is None and capture.end < event.clock < last and isinstance(event.old, Tensor) and event.old.storage is storage:
            if not (isinstance(event.new, Tensor) and event.new.storage is storage) and not isinstance(event.cell.holder, Scope):
                return event
    return None


# --- modes, clocks, keys ---------------------------------------------------------------------------------------------

_MODE_MATTERS = ("Dropout", "BatchNorm", "RReLU", "InstanceNorm", "LSTM", "GRU", "RNN", "MultiheadAttention", "TransformerEncoderLayer", "TransformerDecoderLayer", "SyncBatchNorm")


def frozen_mode(walk: Walk) -> Iterator[Report]:
    """`.eval()` or `.train()` after a capture whose layers depend on the mode."""
    for capture in walk.captures:
        if capture.kind in ("compile",) or "guarded" in capture.tags:
            continue
        replays = walk.replays(capture)
        if not replays:
            continue
        touched = [event.receiver for event in walk.inside(capture) if isinstance(event, ev.CallEvent) and event.name.endswith(".forward") and isinstance(event.receiver, External)]
        sensitive = [one for one in touched if any(mark in one.name for mark in _MODE_MATTERS)]
        for module in sensitive:
            yield from _mode_at_replay(module, capture, replays, walk)
            break


def _mode_at_replay(module: External, capture: ev.Capture, replays: list[ev.ReplayEvent], walk: Walk) -> Iterator[Report]:
    writes = [event for event in walk.of(ev.WriteEvent) if event.how == "mode" and event.cell.holder is module]
    before = [event for event in writes if event.clock < capture.begin]
    held = before[-1].new if before else None
    for replay in replays:
        now = [event for event in writes if capture.end < event.clock < replay.clock]
        if not now:
            continue
        new = now[-1].new
        old_value = held.value if isinstance(held, Host) and held.known else (True if held is None and walk.whole else None)
        if isinstance(new, Host) and new.known and old_value is not None and new.value != old_value:
            report = at(now[-1], "frozen-mode", capture)
            report.related.append((replay.frame, replay.at, "the replay here still runs in the mode of the capture"))
            yield report
            return


def frozen_clock(walk: Walk) -> Iterator[Report]:
    """The clock or the environment, read in a capture and used in a kernel."""
    for event in walk.events:
        if event.capture is None or event.capture.kind == "compile" or not isinstance(event, (ev.OpEvent, ev.CallEvent)):
            continue
        if isinstance(event, ev.CallEvent) and not event.name.startswith("torch."):
            continue
        values = event.operands if isinstance(event, ev.OpEvent) else (*event.args, *event.keywords.values())
        if any("clock" in one.marks for value in values for one in hosts_in(value)):
            read = next((one for one in walk.of(ev.CallEvent) if one.capture is event.capture and one.clock < event.clock and isinstance(one.result, Host) and "clock" in one.result.marks and one.name.startswith(("time.", "datetime."))), None)
            if read is not None:
                yield at(read, "frozen-clock", why="reads the clock once")
                return


def incomplete_key(walk: Walk) -> Iterator[Report]:
    """A graph kept under a key is replayed by a later call of the same function, whose locals differ in what the region read and the key leaves out."""
    for capture in walk.captures:
        if capture.kind not in ("graph", "manual") or capture.graph is None:
            continue
        reads = {event.cell.key: event for event in walk.of(ev.ReadEvent) if event.capture is capture and event.cell.holder is capture.frame.scope and isinstance(event.value, Host)}
        for replay in walk.replays(capture):
            names = replay.names.get(id(capture.frame.func))
            if names is None or names is capture.frame.scope.slots or not reads:
                continue
            for name, read in reads.items():
                now = names.get(name)
                if _other_constant(read.value, now) and name != MODES:
                    yield from _at_key(capture, str(name), read, walk)
                    return


def _other_constant(then: Value, now: Value | None) -> bool:
    if not (isinstance(then, Host) and isinstance(now, Host) and then.kind in ("int", "float", "bool") and now.kind == then.kind):
        return False
    return then.known and now.known and then.value != now.value


def _at_key(capture: ev.Capture, name: str, read: ev.ReadEvent, walk: Walk) -> Iterator[Report]:
    """Reports where the key is made: the assignment of the name under which the graph is stored."""
    kept = next((event for event in walk.of(ev.WriteEvent) if isinstance(event.cell.holder, Mapping) and event.clock > capture.end and _holds(event.new, capture)), None)
    if kept is None:
        return
    function = capture.frame.func
    assigned = _key_expression(function, kept.at) if function is not None else None
    if assigned is not None and name in _mentioned(assigned[1], function):
        return
    report = Report("incomplete-graph-key", capture.frame, assigned[0] if assigned else kept.at, capture, {"why": f"`{name}`", "value": "key"})
    report.related.append((read.frame, read.at, f"the region reads `{name}` here"))
    yield report


def _statements(body: tuple[ir.Stmt, ...]) -> Iterator[ir.Stmt]:
    for stmt in body:
        yield stmt
        yield from _statements(tuple(inner(stmt)))


def _key_expression(function: ir.Function, kept: ir.Span) -> tuple[ir.Span, ir.Expr] | None:
    """Where the key of `graphs[key] = ...` is made: its own assignment, or the index itself."""
    index: ir.Expr | None = None
    for stmt in _statements(function.body):
        if isinstance(stmt, ir.Assign) and stmt.at == kept:
            index = next((target.index for target in stmt.targets if isinstance(target, ir.Subscript)), None)
    if index is None:
        return None
    for stmt in _statements(function.body):
        if isinstance(stmt, ir.Assign) and stmt.value is not None and isinstance(index, ir.Name):
            if any(isinstance(target, ir.Name) and target.id == index.id for target in stmt.targets):
                return stmt.at, stmt.value
    return kept, index


def _mentioned(expression: ir.Expr, function: ir.Function | None) -> set[str]:
    """The names in an expression, and those that they are assigned from."""
    found = set(names_in(expression))
    for stmt in _statements(function.body) if function is not None else ():
        if isinstance(stmt, ir.Assign) and stmt.value is not None:
            if any(isinstance(target, ir.Name) and target.id in found for target in stmt.targets):
                found |= set(names_in(stmt.value))
    return found


def names_in(node: object) -> Iterator[str]:
    """Every name that an expression mentions."""
    if isinstance(node, ir.Name):
        yield node.id
    elif isinstance(node, (tuple, list)):
        for one in node:
            yield from names_in(one)
    elif isinstance(node, msgspec.Struct):
        for field in node.__struct_fields__:
            if field != "at":
                yield from names_in(getattr(node, field))


def _holds(value: Value, capture: ev.Capture) -> bool:
    if value is capture.graph:
        return True
    if isinstance(value, (Items, Mapping)):
        return any(_holds(one, capture) for one in value.slots.values())
    return isinstance(value, Instance) and any(one is capture.graph for one in value.slots.values())
