"""Reads Chrome traces: those of `torch.profiler`, and others that mark device work in the same format."""

from __future__ import annotations

import gzip
import re
from pathlib import Path
from typing import Any

import msgspec

from graphlint.runtime.profiling.timeline import (
    CallKind,
    DeviceOp,
    HostCall,
    HostRange,
    RangeKind,
    Timeline,
    busiest,
    call_kind,
    range_kind,
    with_paths,
)

_RUNTIME = {"cuda_runtime", "cuda_driver", "runtime", "driver", "hip_runtime", "privateuse1_runtime"}
_DEVICE = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset", "memcpy": "memcpy", "memset": "memset"}
_USER = {"user_annotation", "python_function"}
_FOREVER = 1e17  # microseconds; a clock that counts from 1970 stays below 2e15
_DEVICE_LANE = re.compile(r"\bgpu\b|/device:|\bcuda\b|\bstream\b", re.IGNORECASE)


class UnreadableTrace(ValueError):
    """The file is no recording that graphlint can read; the message says why and what would be one."""


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
    forward_thread: Any = msgspec.field(default=None, name="Fwd thread id")
    label: Any = msgspec.field(default=None, name="name")


class _Device(msgspec.Struct):
    name: str = ""


class _File(msgspec.Struct):
    events: list[_Event] = msgspec.field(name="traceEvents")
    devices: list[_Device] = msgspec.field(name="deviceProperties", default_factory=list)
    torch: str | None = msgspec.field(name="pytorch_version", default=None)


def read(path: Path) -> Timeline:
    """The timeline of a Chrome trace file (`.json` or `.json.gz`).

    Raises:
        UnreadableTrace: the text is no JSON, no Chrome trace, or holds no device work.
        OSError: the file can't be opened.
    """
    file = _decode(_bytes(path), path)
    reader = _Reader(file)
    reader.take_all()
    device, note = busiest(reader.devices)
    if not device:
        raise UnreadableTrace(
            f"{path}: the trace holds no device work; record it with ProfilerActivity.CUDA beside ProfilerActivity.CPU"
        )
    return Timeline(
        source=path.name,
        calls=tuple(sorted(reader.calls, key=lambda c: c.start)),
        ranges=tuple(with_paths(sorted(reader.ranges, key=lambda r: (r.start, -r.end)))),
        device=tuple(sorted(device, key=lambda o: (o.start, o.end))),
        card=file.devices[0].name if file.devices else "",
        torch=file.torch or "",
        notes=(*reader.notes, *filter(None, [note])),
    )


def _bytes(path: Path) -> bytes:
    data = path.read_bytes()
    try:
        return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    except (OSError, EOFError) as error:
        raise UnreadableTrace(f"{path}: the gzip file is damaged ({error}); record it again") from None


def _decode(data: bytes, path: Path) -> _File:
    """Both forms of the format: an object with `traceEvents`, or a bare list whose end may be missing."""
    body = data.strip()
    try:
        if not body.startswith(b"["):
            return msgspec.json.decode(body, type=_File)
        if not body.endswith(b"]"):
            body = body.rstrip(b",") + b"]"
        return _File(events=msgspec.json.decode(body, type=list[_Event]))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnreadableTrace(
            f"{path}: no Chrome trace ({error}); give a file written by prof.export_chrome_trace()"
        ) from None


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
        self._threads: dict[tuple[Any, Any], int] = {}
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

    def _close(self, event: _Event) -> None:
        stack = self._open.get((_text(event.pid), _text(event.tid)))
        if stack:
            begin = stack.pop()
            start = _number(begin.ts)
            self._take(begin, start, _number(event.ts) - start)

    def _device_lanes(self) -> set[tuple[Any, Any]]:
        """Lanes that a foreign trace names after a device, used where no category says what an event is."""
        lanes: set[tuple[Any, Any]] = set()
        if any(_text(e.cat) in _DEVICE for e in self.file.events):
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
        category, name, end = _text(event.cat), _text(event.name), start + max(duration, 0.0)
        if category in _DEVICE:
            self._take_device(event, name, start, end, _DEVICE[category])
        elif self._lanes and self._in_lane(event):
            self._take_device(event, name, start, end, "memcpy" if "memcpy" in name.lower() else "kernel")
        elif category in _RUNTIME or name.startswith(("cudaLaunch", "cuLaunch", "hipLaunch")):
            self._take_call(event, name, start, end)
        elif category == "cpu_op":
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
        stream = _integer(args.stream)
        self.devices.setdefault(_text(event.pid), []).append(
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
            correlation = _integer(_args(event).correlation)
            self.calls.append(HostCall(name, start, end, self._thread(event), kind, correlation))

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
