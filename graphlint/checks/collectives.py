"""Collectives and transfers between ranks: communicators, handles, backends."""

from __future__ import annotations

from collections.abc import Iterator

from graphlint.checks.base import Report, Walk, at, constant, given_true
from graphlint.checks.calls import fact_of
from graphlint.flow import events as ev
from graphlint.flow.values import External, Host, Value

COLLECTIVES = frozenset({
    "all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor", "broadcast",
    "reduce", "all_to_all", "all_to_all_single", "gather", "scatter",
})  # fmt: skip
TRANSFERS = frozenset({"send", "recv", "isend", "irecv", "batch_isend_irecv"})
MADE = ("torch.distributed.init_process_group", "torch.distributed.new_group")


def is_one_of(event: ev.CallEvent, names: frozenset[str]) -> bool:
    head, _, last = event.name.rpartition(".")
    return head == "torch.distributed" and last in names


def collectives(event: ev.CallEvent, walk: Walk) -> Iterator[Report]:
    """The first collective of a group makes its communicator; a gloo group works on the host."""
    if not is_one_of(event, COLLECTIVES | TRANSFERS):
        return
    group = event.keywords.get("group")
    backend = _backend(group, event, walk)
    if (backend is not None and "gloo" in backend) or backend == "mpi":
        yield at(event, "cpu-collective")
        return
    if not walk.whole or event.capture is None or is_one_of(event, TRANSFERS):
        return
    earlier = [one for one in walk.of(ev.CallEvent) if one.clock < event.capture.begin and is_one_of(one, COLLECTIVES)]
    made = [one for one in walk.of(ev.CallEvent) if one.name in MADE]
    if (
        made
        and not any(
            _same_group(one.keywords.get("group"), group)
            or (one.at == event.at and one.frame.module is event.frame.module)
            for one in earlier
        )
        and not any("device_id" in one.keywords for one in made)
    ):
        report = at(event, "first-collective")
        report.related.append(
            (made[-1].frame, made[-1].at, "the group is made here; its communicator comes with the first collective")
        )
        yield report


def pipeline_transfer(event: ev.CallEvent, walk: Walk) -> Iterator[Report]:
    """The first transfer of a pair of ranks, or the step of a pipeline schedule."""
    fact = fact_of(event, walk, "pipeline-transfer")
    if fact is None or event.capture is None:
        return
    if is_one_of(event, TRANSFERS):
        begin = event.capture.begin
        if not walk.whole or any(
            one.clock < begin and (is_one_of(one, TRANSFERS) or one.name.startswith("?"))
            for one in walk.of(ev.CallEvent)
        ):
            return
    yield at(event, "pipeline-transfer", why=fact.why)


def unwaited_handle(capture: ev.Capture, walk: Walk) -> Iterator[Report]:
    """An asynchronous collective runs on a stream of its own; without `wait()` nothing joins it."""
    calls = [event for event in walk.inside(capture) if isinstance(event, ev.CallEvent)]
    if any(event.name == "?.wait" for event in calls):
        return  # perhaps of one of them
    waited = {id(event.receiver) for event in calls if event.name == "torch.distributed.Work.wait"}
    for event in calls:
        handle = event.result
        if (
            isinstance(handle, External)
            and handle.name == "torch.distributed.Work"
            and event.name != "torch.distributed.Work.wait"
            and id(handle) not in waited
        ):
            if not _handed_on(handle, capture, walk) and (
                given_true(event.keywords.get("async_op")) or is_one_of(event, TRANSFERS)
            ):
                yield at(event, "unjoined-stream")


def _handed_on(handle: External, capture: ev.Capture, walk: Walk) -> bool:
    """Whether the handle was put where others may wait for it: a container, an attribute, an argument."""
    for event in walk.inside(capture):
        if isinstance(event, ev.MutateEvent) and any(one is handle for one in event.values):
            return True
        if isinstance(event, ev.CallEvent) and any(one is handle for one in (*event.args, *event.keywords.values())):
            return True
    return False


def _same_group(one: Value | None, other: Value | None) -> bool:
    return one is other or (isinstance(one, Host) and other is None) or (isinstance(other, Host) and one is None)


def _backend(group: Value | None, event: ev.CallEvent, walk: Walk) -> str | None:
    for one in walk.of(ev.CallEvent):
        if one.clock > event.clock:
            break
        if one.name == "torch.distributed.new_group" and group is not None and one.result is group:
            found = constant(one.keywords.get("backend"))
            return found if isinstance(found, str) else None
        if one.name == "torch.distributed.init_process_group" and group is None:
            found = constant(one.args[0] if one.args else one.keywords.get("backend"))
            return found if isinstance(found, str) and ":" not in found and "," not in found else None
    return None
