"""A static input that is filled only in part: does the graph read what an earlier, longer one left behind?"""

from __future__ import annotations

from collections.abc import Iterator

from graphlint.checks.base import Report, Walk, at, cell_name, constant
from graphlint.checks.memory import captured, inputs_of
from graphlint.flow import events as ev
from graphlint.flow import names
from graphlint.flow.values import Cell, Items, Storage, Tensor, Value, alternatives, tensors_in

_MASKS = (
    "where",
    "masked_fill",
    "masked_fill_",
    "index_select",
    "gather",
    "tril",
    "triu",
    "lt",
    "gt",
    "le",
    "ge",
    "eq",
    "ne",
    "scaled_dot_product_attention",
    "masked_scatter",
    "bucketize",
)
_COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")
_MIXING = names.REDUCTIONS | {"softmax", "log_softmax", "cumsum", "sort", "topk"}


def partial_refill(walk: Walk) -> Iterator[Report]:
    """Only a part of a static input is refilled, and nothing keeps the rest out of the result."""
    for capture in captured(walk):
        inputs = {
            tensor.storage: cell
            for cell, (_, tensor) in inputs_of(capture, walk).items()
            if tensor.storage.owner not in ("param", "grad", "buffer")
        }
        inputs = {storage: cell for storage, cell in inputs.items() if _read_whole(storage, capture, walk)}
        fills = [
            event
            for event in walk.of(ev.InplaceEvent)
            if event.storage in inputs and event.part and event.capture is None and event.clock > capture.end
        ]
        for fill in fills:
            replay = next((event for event in walk.replays(capture) if event.clock > fill.clock), None)
            if (
                replay is None
                or not _of_tensor(fill)
                or not _stands_for_all(fill, fills, replay, walk)
                or not _rest_matters(fill, inputs, replay, capture, walk)
            ):
                continue
            report = at(fill, "partial-refill", capture, value=cell_name(inputs[fill.storage]).lstrip("."))
            report.related.append((replay.frame, replay.at, "the replay reads all of it"))
            yield report
            break


def _of_tensor(fill: ev.InplaceEvent) -> bool:
    return fill.source is not None and (
        fill.name == "copy_" or any(isinstance(one, Tensor) for one in alternatives(fill.source))
    )


def _operands(event: ev.Event) -> list[Value]:
    if isinstance(event, ev.OpEvent):
        return list(event.operands)
    if (
        isinstance(event, ev.CallEvent)
        and event.name.rpartition(".")[2] not in names.VIEWS | names.MANY_VIEWS | names.HOST_METHODS
    ):
        return [*event.args, *event.keywords.values(), *([event.receiver] if event.receiver is not None else [])]
    return []


def _read_whole(storage: Storage, capture: ev.Capture, walk: Walk) -> bool:
    """Whether work in the region takes the whole tensor, and not only a slice of the size that the graph is for."""
    return any(
        one.storage is storage and not one.part
        for event in walk.inside(capture)
        if _of_torch(event)
        for value in _operands(event)
        for one in tensors_in(value)
    )


def _of_torch(event: ev.Event) -> bool:
    """A kernel of another library most likely takes lengths beside the buffer."""
    return isinstance(event, ev.OpEvent) or (isinstance(event, ev.CallEvent) and event.name.startswith("torch."))


def _stands_for_all(fill: ev.InplaceEvent, fills: list[ev.InplaceEvent], replay: ev.ReplayEvent, walk: Walk) -> bool:
    """A head `[:n]`, or rows written one by one in a loop; one row alone is the update of a slot beside others that
    stay valid."""
    index = next(
        (
            event.index
            for event in reversed(walk.of(ev.IndexEvent))
            if event.clock < fill.clock and event.frame is fill.frame and _inside(event.at, fill.at)
        ),
        None,
    )
    first = index.values[0] if isinstance(index, Items) and index.slots else index
    if index is None or getattr(first, "name", "") == "slice" or isinstance(index, Items):
        return index is not None
    return any(
        one is not fill and one.at == fill.at and one.frame is fill.frame and one.clock < replay.clock for one in fills
    )


def _inside(inner: tuple[int, int, int, int], outer: tuple[int, int, int, int]) -> bool:
    return outer[:2] <= inner[:2] and inner[2:] <= outer[2:]


def _rest_matters(
    fill: ev.InplaceEvent, inputs: dict[Storage, Cell], replay: ev.ReplayEvent, capture: ev.Capture, walk: Walk
) -> bool:
    beside = [
        event
        for event in walk.of(ev.InplaceEvent)
        if event.frame is fill.frame and event is not fill and event.clock > capture.end and event.at != fill.at
    ]
    if any(event.storage is fill.storage for event in beside):
        return False  # the rest is cleared
    lengths = {event.storage for event in beside if event.capture is None}
    if not _mixes_rows(capture, walk):
        return not lengths & _read(capture, walk) and not _used_in_part(capture, replay, walk)
    return not (lengths & _read(capture, walk) and _masked(lengths, capture, walk))


def _read(capture: ev.Capture, walk: Walk) -> set[Storage]:
    return {tensor.storage for _, tensor in inputs_of(capture, walk).values()}


def _mixes_rows(capture: ev.Capture, walk: Walk) -> bool:
    """Whether the region reduces over the first dimension, or over all: then each row bears on all results."""
    for event in walk.inside(capture):
        if not isinstance(event, ev.CallEvent) or event.name.rpartition(".")[2] not in _MIXING:
            continue
        method = isinstance(event.receiver, Tensor)
        rest = event.args if method else event.args[1:]
        given = event.keywords.get(
            "dim", event.keywords.get("axis", rest[0] if rest and not isinstance(rest[0], Tensor) else None)
        )
        whole = (
            given is None
            and event.name.rpartition(".")[2] in names.REDUCTIONS
            and not any(isinstance(one, Tensor) for one in rest)
        )
        if (whole or constant(given) == 0) and _from_outside(event, capture):
            return True
    return False


def _from_outside(event: ev.CallEvent, capture: ev.Capture) -> bool:
    return bool(
        tensors_in(event.receiver) if event.receiver is not None else any(tensors_in(one) for one in event.args)
    )


def _masked(lengths: set[Storage], capture: ev.Capture, walk: Walk) -> bool:
    """Whether the region may keep the rest out: it compares, selects, multiplies by what is filled beside, or does what
    is not known."""
    for event in walk.inside(capture):
        if isinstance(event, ev.OpEvent) and (
            event.op in _COMPARISONS
            or (
                event.op in ("*", "&", "@")
                and any(one.storage in lengths for value in event.operands for one in tensors_in(value))
            )
        ):
            return True
        if isinstance(event, ev.CallEvent) and (
            event.name.rpartition(".")[2] in _MASKS
            or event.name.startswith(("?", "flash_attn", "torch.ops", "triton", "xformers"))
        ):
            return True
    return False


def _used_in_part(capture: ev.Capture, replay: ev.ReplayEvent, walk: Walk) -> bool:
    """Whether only a part of the output is taken after the replay."""
    for event in walk.of(ev.IndexEvent):
        if (
            event.clock > replay.clock
            and event.capture is None
            and any(isinstance(one, Tensor) and one.storage.pool is capture for one in alternatives(event.obj))
        ):
            return True
    return False
