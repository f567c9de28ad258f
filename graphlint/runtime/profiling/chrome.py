"""Reads Chrome traces: those of `torch.profiler`, and others that mark device work in the same format."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from graphlint.runtime.profiling.jsonfile import UnreadableTrace, decoded, unpacked
from graphlint.runtime.profiling.timeline import (
    CallKind,
    DeviceOp,
    HostCall,
    HostRange,
    RangeKind,
    Timeline,
    busiest,
    call_kind,
    collector_paused,
    range_kind,
    with_paths,
)

_RUNTIME = {"cuda_runtime", "cuda_driver", "runtime", "driver", "hip_runtime", "xpu_runtime", "privateuse1_runtime"}
_OPERATOR = {"cpu_op", "operator"}
_DEVICE = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset", "memcpy": "memcpy", "memset": "memset"}
_USER = {"user_annotation", "python_function"}
_FOREVER = 1e17  # microseconds; a clock that counts from 1970 stays below 2e15
_DEVICE_LANE = re.compile(r"\bgpu\b|/device:|\bcuda\b|\bstream\b", re.IGNORECASE)


class _Event(msgspec.Struct):
    """One event; other tools keep anything in its fields, so that only their use decides whether they make sense."""

    ph: Any = None
    cat: Any = None
    name: Any = None
    ts: Any = None
    dur: Any = None
    pid: Any = None
    tid: Any = None
    args: msgspec.Raw = msgspec.Raw(b"")


class _Args(msgspec.Struct):
    correlation: Any = None
    stream: Any = None
    grid: Any = None
    bytes: Any = msgspec.field(default=None, name="bytes")
    sequence: Any = msgspec.field(default=None, name="Sequence number")
    external: Any = msgspec.field(default=None, name="External id")
    forward_thread: Any = msgspec.field(default=None, name="Fwd thread id")
    label: Any = msgspec.field(default=None, name="name")


class _File(msgspec.Struct):
    events: list[_Event] = msgspec.field(name="traceEvents")
    devices: Any = msgspec.field(name="deviceProperties", default=None)
    torch: Any = msgspec.field(name="pytorch_version", default=None)


def read(path: Path) -> Timeline:
    """The timeline of a Chrome trace file (`.json` or `.json.gz`).

    Of a file that was cut short what is whole is read, and noted.

    Raises:
        UnreadableTrace: the text is no JSON, no Chrome trace, or holds no device work.
        OSError: the file can't be opened.
    """
    data, notes = unpacked(path)
    with collector_paused():
        file, more = decoded(data, path, _File, list[_Event])
        return _timeline(file, path, [*notes, *more])


def _timeline(file: _File, path: Path, notes: list[str]) -> Timeline:
    reader = _Reader(file)
    reader.take_all()
    device, note = busiest(reader.devices)
    if not device:
        raise UnreadableTrace(
            f"{path}: the trace holds no device work; record it with ProfilerActivity.CUDA beside ProfilerActivity.CPU"
        )
    calls, ranges = reader.host_of(device)
    return Timeline(
        source=path.name,
        calls=tuple(sorted(calls, key=lambda c: c.start)),
        ranges=tuple(with_paths(sorted(ranges, key=lambda r: (r.start, -r.end)))),
        device=tuple(sorted(device, key=lambda o: (o.start, o.end))),
        card=_card(file),
        torch=_text(file.torch),
        notes=(*notes, *filter(None, [note]), *reader.notes),
    )


def _card(file: _File) -> str:
    devices = file.devices if isinstance(file.devices, list) else []
    return next((_text(d["name"]) for d in devices if isinstance(d, dict) and "name" in d), "")


def _integer(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError):
        return None


class _Reader:
    """Sorts events into host calls, host ranges and device work."""

    def __init__(self, file: _File) -> None:
        self.file = file
        self.calls: list[HostCall] = []
        self.ranges: list[HostRange] = []
        self.devices: dict[object, list[DeviceOp]] = {}
        self.notes: list[str] = []
        self._threads: dict[tuple[Any, Any], int] = {}  # (process, thread) of the trace to a number
        self._calls_by_id: dict[int, list[int]] = {}  # of each external id, the places of its calls that launch
        self._ops_by_id: dict[tuple[object, int], list[int]] = {}
        self._open: dict[tuple[Any, Any], list[_Event]] = {}
        self._lanes = self._device_lanes()

    def take_all(self) -> None:
        for event in self.file.events:
            if event.ph == "X":
                self._take(event, _number(event.ts), _number(event.dur))
            elif event.ph == "B":
                self._open.setdefault((_text(event.pid), _text(event.tid)), []).append(event)
            elif event.ph == "E":
                self._close(event)
        if not any(o.correlation is not None for ops in self.devices.values() for o in ops):
            self._correlate()

    def _close(self, event: _Event) -> None:
        stack = self._open.get((_text(event.pid), _text(event.tid)))
        if stack:
            begin = stack.pop()
            start = _number(begin.ts)
            self._take(begin, start, _number(event.ts) - start)

    def _device_lanes(self) -> set[tuple[Any, Any]]:
        """Lanes that a foreign trace names after a device, used where no category says what an event is."""
        lanes: set[tuple[Any, Any]] = set()
        if any(_text(e.cat).lower() in _DEVICE for e in self.file.events):
            return lanes
        for event in self.file.events:
            if event.ph == "M" and event.name in ("process_name", "thread_name"):
                label = _args(event).label
                if isinstance(label, str) and _DEVICE_LANE.search(label):
                    lanes.add((_text(event.pid), None if event.name == "process_name" else _text(event.tid)))
        if lanes:
            self.notes.append("device work was told from host work by the names of the lanes")
        return lanes

    def _take(self, event: _Event, start: float, duration: float) -> None:
        category, name, end = _text(event.cat).lower(), _text(event.name), start + max(duration, 0.0)
        if category in _DEVICE:
            self._take_device(event, name, start, end, _DEVICE[category])
        elif self._lanes and self._in_lane(event):
            self._take_device(event, name, start, end, "memcpy" if "memcpy" in name.lower() else "kernel")
        elif category in _RUNTIME or name.startswith(("cudaLaunch", "cuLaunch", "hipLaunch")):
            self._take_call(event, name, start, end)
        elif category in _OPERATOR:
            args = _args(event)
            backward = bool(_integer(args.forward_thread))
            thread = self._thread(event)
            self.ranges.append(HostRange(name, start, end, thread, RangeKind.OP, _integer(args.sequence), backward))
        elif category in _USER or category == "":
            kind = range_kind(name)
            if category != "python_function" or kind is RangeKind.MODULE:  # a trace with stacks names every frame
                self.ranges.append(HostRange(name, start, end, self._thread(event), kind))

    def _take_device(self, event: _Event, name: str, start: float, end: float, kind: str) -> None:
        args = _args(event)
        grid = tuple(args.grid) if isinstance(args.grid, list) else ()
        stream, number = _integer(args.stream), _integer(args.external)
        ops = self.devices.setdefault(_text(event.pid), [])
        if number is not None:
            self._ops_by_id.setdefault((_text(event.pid), number), []).append(len(ops))
        ops.append(
            DeviceOp(
                name=name,
                start=start,
                end=end,
                stream=self._thread(event) if stream is None else stream,
                kind=kind,
                correlation=_integer(args.correlation),
                grid=grid,
                bytes=_integer(args.bytes) or 0,
            )
        )

    def _take_call(self, event: _Event, name: str, start: float, end: float) -> None:
        kind = call_kind(name)
        if kind is not CallKind.OTHER:
            args = _args(event)
            number = _integer(args.external)
            if number is not None and kind in (CallKind.LAUNCH, CallKind.GRAPH):
                self._calls_by_id.setdefault(number, []).append(len(self.calls))
            correlation = _integer(args.correlation)
            self.calls.append(HostCall(name, start, end, self._thread(event), kind, correlation))

    def _correlate(self) -> None:
        """Ties work to launches where no event has a correlation, as on some AMD cards: both carry the number of their
        operator, and its first launch enqueues its first kernel.
        """
        pairs = [
            (device, op, call)
            for (device, number), ops in self._ops_by_id.items()
            for op, call in zip(ops, self._calls_by_id.get(number, ()), strict=False)
        ]
        for correlation, (device, op, call) in enumerate(pairs):
            self.devices[device][op] = replace(self.devices[device][op], correlation=correlation)
            self.calls[call] = replace(self.calls[call], correlation=correlation)
        if pairs:
            self.notes.append("no correlations in the trace: work was tied to launches by the numbers of operators")
        else:
            self.notes.append("no correlations in the trace: which launch enqueued which kernel is unknown")

    def host_of(self, device: Sequence[DeviceOp]) -> tuple[list[HostCall], list[HostRange]]:
        """Calls and ranges of the process that launched the work: in a trace of several, numbers repeat."""
        process = {number: key[0] for key, number in self._threads.items()}
        launched: dict[tuple[Any, int], float] = {}
        for call in self.calls:
            if call.correlation is not None:
                launched[process[call.thread], call.correlation] = call.start
        candidates = sorted({key[0] for key in launched})
        if len(candidates) < 2:
            return self.calls, self.ranges

        def fits(candidate: Any) -> tuple[int, float]:
            """How many launches precede their work, and by how little: another process's numbers match by chance."""
            pairs = ((launched.get((candidate, o.correlation)), o.start) for o in device if o.correlation is not None)
            delays = [start - at for at, start in pairs if at is not None and start >= at]
            return len(delays), -sum(delays)

        chosen = max(candidates, key=fits)
        self.notes.append(f"{len(candidates)} processes in the trace: the calls of process {chosen} are taken")
        return (
            [c for c in self.calls if process[c.thread] == chosen],
            [r for r in self.ranges if process[r.thread] == chosen],
        )

    def _in_lane(self, event: _Event) -> bool:
        process = _text(event.pid)
        return (process, _text(event.tid)) in self._lanes or (process, None) in self._lanes

    def _thread(self, event: _Event) -> int:
        return self._threads.setdefault((_text(event.pid), _text(event.tid)), len(self._threads))


def _number(value: Any) -> float:
    """A time in microseconds; some tools write it as text."""
    try:
        number = float(value or 0.0)
    except (TypeError, ValueError):
        return 0.0
    return number if abs(number) < _FOREVER else 0.0  # no number is never smaller


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)


def _args(event: _Event) -> _Args:
    try:
        return msgspec.json.decode(event.args, type=_Args) if event.args else _Args()
    except msgspec.DecodeError:
        return _Args()  # a foreign trace may keep anything here
