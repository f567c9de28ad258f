"""Reads Nsight Systems recordings exported to SQLite (`nsys export --type sqlite report.nsys-rep`).

The export creates a table only when it has rows, and columns came and went with the versions; what is missing is left
out and noted, never guessed.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from graphlint.runtime.profiling.chrome import UnreadableTrace
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

_T = TypeVar("_T", HostCall, HostRange, DeviceOp)

_PUSH_POP = 59  # NVTX eventType of a range on one thread
_START_END = 60  # NVTX eventType of a range that may end on another thread
_COPIES = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP"}
_EMIT_NVTX = re.compile(r"^(?P<op>.+?), (?:seq|op_id) = (?P<number>\d+)")  # what torch's emit_nvtx() writes


def read(path: Path) -> Timeline:
    """The timeline of an Nsight Systems SQLite export.

    Raises:
        UnreadableTrace: no database, or one without CUDA work.
    """
    database = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        return _Reader(database, path).timeline()
    except sqlite3.DatabaseError as error:
        raise UnreadableTrace(
            f"{path}: no Nsight Systems export ({error}); write one with `nsys export --type sqlite`"
        ) from None
    finally:
        database.close()


class _Reader:
    def __init__(self, database: sqlite3.Connection, path: Path) -> None:
        self.database = database
        self.path = path
        listed = database.execute("select name from sqlite_master where type in ('table', 'view')")
        self.tables = {row[0] for row in listed}
        self.notes: list[str] = []
        self.strings: dict[int, str] = {}
        if "StringIds" in self.tables:
            self.strings = dict(database.execute("select id, value from StringIds"))

    def timeline(self) -> Timeline:
        devices: dict[object, list[DeviceOp]] = {}
        for number, op in [*self._kernels(), *self._copies(), *self._fills(), *self._graphs()]:
            devices.setdefault(number, []).append(op)
        device, note = busiest(devices)
        self.notes += filter(None, [note])
        if not device:
            raise UnreadableTrace(f"{self.path}: no CUDA work in the export; record with `nsys profile -t cuda,nvtx`")
        calls, ranges = list(self._calls()), list(self._ranges())
        if not ranges:
            self.notes.append("no NVTX ranges in the export: steps and modules are unknown")
        origin = min(*(o.start for o in device), *(c.start for c in calls), *(r.start for r in ranges), float("inf"))
        return Timeline(
            source=self.path.name,
            calls=_shift(calls, origin),
            ranges=tuple(with_paths(_shift(ranges, origin))),
            device=_shift(device, origin),
            card=self._card(),
            notes=tuple(self.notes),
        )

    def _rows(self, table: str, *columns: str) -> Iterator[tuple[Any, ...]]:
        """The table's rows; a column that this version of the export lacks reads as None."""
        if table not in self.tables:
            return
        present = {row[1] for row in self.database.execute(f'pragma table_info("{table}")')}
        wanted = ", ".join(f'"{c}"' if c in present else "null" for c in columns)
        yield from self.database.execute(f'select {wanted} from "{table}" where "end" is not null')

    def _text(self, *identifiers: int | None) -> str:
        return next((self.strings[i] for i in identifiers if i in self.strings), "?")

    def _kernels(self) -> Iterator[tuple[int, DeviceOp]]:
        columns = (
            "start",
            "end",
            "deviceId",
            "streamId",
            "correlationId",
            "demangledName",
            "shortName",
            "gridX",
            "gridY",
            "gridZ",
        )
        for start, end, device, stream, correlation, long, short, *grid in self._rows(
            "CUPTI_ACTIVITY_KIND_KERNEL", *columns
        ):
            dims = tuple(int(g) for g in grid if g is not None)
            name = self._text(long, short)
            yield device or 0, DeviceOp(name, start / 1e3, end / 1e3, stream or 0, "kernel", correlation, dims)

    def _copies(self) -> Iterator[tuple[int, DeviceOp]]:
        columns = ("start", "end", "deviceId", "streamId", "correlationId", "copyKind", "bytes")
        for start, end, device, stream, correlation, kind, size in self._rows("CUPTI_ACTIVITY_KIND_MEMCPY", *columns):
            name = f"Memcpy {_COPIES.get(kind, '')}".strip()
            yield device or 0, DeviceOp(name, start / 1e3, end / 1e3, stream or 0, "memcpy", correlation, (), size or 0)

    def _fills(self) -> Iterator[tuple[int, DeviceOp]]:
        columns = ("start", "end", "deviceId", "streamId", "correlationId", "bytes")
        for start, end, device, stream, correlation, size in self._rows("CUPTI_ACTIVITY_KIND_MEMSET", *columns):
            yield (
                device or 0,
                DeviceOp("Memset", start / 1e3, end / 1e3, stream or 0, "memset", correlation, (), size or 0),
            )

    def _graphs(self) -> Iterator[tuple[int, DeviceOp]]:
        """Whole replays, where nsys ran with `--cuda-graph-trace=graph` (its default)."""
        columns = ("start", "end", "deviceId", "streamId", "correlationId", "graphId")
        for start, end, device, stream, correlation, graph in self._rows("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", *columns):
            yield (
                device or 0,
                DeviceOp(f"CUDA graph {graph}", start / 1e3, end / 1e3, stream or 0, "graph", correlation),
            )

    def _calls(self) -> Iterator[HostCall]:
        columns = ("start", "end", "globalTid", "nameId", "correlationId")
        for start, end, thread, name_id, correlation in self._rows("CUPTI_ACTIVITY_KIND_RUNTIME", *columns):
            name = re.sub(r"_v\d+$", "", self._text(name_id))  # nsys writes cudaLaunchKernel_v7000
            kind = call_kind(name)
            if kind is not CallKind.OTHER:
                yield HostCall(name, start / 1e3, end / 1e3, thread or 0, kind, correlation)

    def _ranges(self) -> Iterator[HostRange]:
        columns = ("start", "end", "globalTid", "text", "textId", "eventType")
        for start, end, thread, text, text_id, event_type in self._rows("NVTX_EVENTS", *columns):
            if event_type is not None and event_type not in (_PUSH_POP, _START_END):
                continue
            name = text or self._text(text_id)
            operator = _EMIT_NVTX.match(name)
            if operator:
                number = re.search(r"seq = (\d+)", name)
                backward = "Backward" in operator["op"]
                sequence = int(number[1]) if number else None
                yield HostRange(operator["op"], start / 1e3, end / 1e3, thread or 0, RangeKind.OP, sequence, backward)
            else:
                yield HostRange(name, start / 1e3, end / 1e3, thread or 0, range_kind(name))

    def _card(self) -> str:
        if "TARGET_INFO_GPU" not in self.tables:
            return ""
        row = self.database.execute("select name from TARGET_INFO_GPU limit 1").fetchone()
        return str(row[0]) if row else ""


def _shift(events: Iterable[_T], by: float) -> tuple[_T, ...]:
    """The events on a clock that starts at the first one, sorted."""
    moved = (replace(e, start=e.start - by, end=e.end - by) for e in events)
    return tuple(sorted(moved, key=lambda e: (e.start, -e.end)))
