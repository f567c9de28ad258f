"""Reads Nsight Systems recordings exported to SQLite (`nsys export --type sqlite report.nsys-rep`).

The export creates a table only when it has rows, and columns came and went with the versions; what is missing is left
out and noted, never guessed. One file may hold many processes, each with its own numbers for devices, launches and
threads: the work of the device that did most is judged, with the host calls and ranges of its process.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from graphlint.runtime.profiling.jsonfile import UnreadableTrace
from graphlint.runtime.profiling.timeline import (
    CallKind,
    DeviceOp,
    HostCall,
    HostRange,
    RangeKind,
    Timeline,
    call_kind,
    collector_paused,
    range_kind,
    with_paths,
)

_T = TypeVar("_T", HostCall, HostRange, DeviceOp)

_CUPTI = "CUPTI_ACTIVITY_KIND_"
_WORK = tuple(_CUPTI + kind for kind in ("KERNEL", "MEMCPY", "MEMSET", "GRAPH_TRACE"))
_RANGES = (59, 60, 70, 71)  # NVTX eventType: push and pop, start and end, and both of them imported from text files
_COPIES = {1: "HtoD", 2: "DtoH", 8: "DtoD", 9: "HtoH", 10: "PtoP", 11: "HtoD", 12: "DtoH", 13: "DtoD"}
_EMIT_NVTX = re.compile(r"^(?P<op>.+?), (?:seq|op_id) = (?P<number>\d+)")  # what torch's emit_nvtx() writes
_NAMES = ("text", "demangledName", "shortName", "nameId")  # a text, or the number of one
_PROCESS = 24  # a serialised thread is one of these bits; above them are process and machine
_PID = (1 << 24) - 1
_LOST = re.compile(r"not all|lost|dropped|incomplete|may be missing", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Source:
    """Where the judged work ran: columns that the export lacks are None."""

    process: int | None  # globalPid, serialised
    device: int | None  # as that process numbers it

    @property
    def pid(self) -> int | None:
        return None if self.process is None else self.process >> _PROCESS & _PID


def read(path: Path) -> Timeline:
    """The timeline of an Nsight Systems SQLite export.

    Raises:
        UnreadableTrace: no export of Nsight Systems, a damaged one, or one without CUDA work.
    """
    database = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
    try:
        with collector_paused():
            return _Reader(database, path).timeline()
    except (
        sqlite3.OperationalError,
        TypeError,
    ) as error:  # a column that is not there, a text where a number should be
        raise UnreadableTrace(
            f"{path}: an export of unknown layout ({error}); export it with another version"
        ) from None
    except sqlite3.DatabaseError as error:
        raise UnreadableTrace(
            f"{path}: the database is damaged or cut short ({error}); write it again with `nsys export --type sqlite`"
        ) from None
    finally:
        database.close()


class _Reader:
    def __init__(self, database: sqlite3.Connection, path: Path) -> None:
        self.database = database
        self.database.text_factory = lambda raw: raw.decode(errors="replace")
        self.path = path
        listed = database.execute("select name from sqlite_master where type in ('table', 'view')")
        self.tables = {row[0] for row in listed}
        self.notes: list[str] = []
        self.origin = 0  # nanoseconds; times count from here, so that they stay exact as floating-point microseconds
        self.strings: dict[int, str] = {}
        if {"id", "value"} <= self._columns("StringIds"):
            self.strings = dict(database.execute("select id, cast(value as text) from StringIds"))

    def timeline(self) -> Timeline:
        source = self._busiest()
        self.origin = self._first_moment()
        device = [*self._kernels(source), *self._copies(source), *self._fills(source), *self._graphs(source)]
        calls, ranges = list(self._calls(source)), list(self._ranges(source))
        self._note_what_is_missing(calls, ranges)
        return Timeline(
            source=self.path.name,
            calls=_sorted(calls),
            ranges=tuple(with_paths(_sorted(ranges))),
            device=_sorted(device),
            card=self._card(source),
            notes=tuple(self.notes),
        )

    def _busiest(self) -> _Source:
        """The process and device that did most work."""
        busy: dict[_Source, int] = {}
        for table in _WORK:
            columns = self._columns(table)
            if not {"start", "end"} <= columns:
                continue
            process, device = (name if name in columns else "null" for name in ("globalPid", "deviceId"))
            query = f'select {process}, {device}, sum("end" - start) from {table} where "end" >= start group by 1, 2'
            for *key, total in self.database.execute(query):
                busy[_Source(*key)] = busy.get(_Source(*key), 0) + total
        if not busy:
            raise UnreadableTrace(f"{self.path}: {self._why_no_work()}")
        chosen = max(busy, key=lambda s: busy[s])
        if len(busy) > 1:
            processes = len({s.process for s in busy})
            where = f"device {chosen.device}" + (f" of process {chosen.pid}" if processes > 1 else "")
            several = f"{processes} processes with {len(busy)} devices" if processes > 1 else f"{len(busy)} devices"
            self.notes.append(f"{several} in the recording: {where}, the busiest one, is judged")
        return chosen

    def _why_no_work(self) -> str:
        if "StringTable" in self.tables:
            return "a database of nvprof, which is not read; record with `nsys profile -t cuda,nvtx` and export that"
        if not any(t in self.tables for t in ("StringIds", "META_DATA_EXPORT", "TARGET_INFO_GPU", "NVTX_EVENTS")):
            return "a SQLite database, but no export of Nsight Systems; write one with `nsys export --type sqlite`"
        if _CUPTI + "RUNTIME" in self.tables:
            return "CUDA calls but no device work in the export; record again, with no other profiler on the GPU"
        return "no CUDA work in the export; record with `nsys profile -t cuda,nvtx`"

    def _note_what_is_missing(self, calls: list[HostCall], ranges: list[HostRange]) -> None:
        if not calls:
            self.notes.append("no CUDA calls of the host in the export: what the host did is unknown")
        if not ranges:
            self.notes.append("no NVTX ranges in the export: steps and modules are unknown")
        if "text" in self._columns("DIAGNOSTIC_EVENT"):
            said = [row[0] for row in self.database.execute("select distinct text from DIAGNOSTIC_EVENT")]
            self.notes += [f"Nsight Systems says: {text}" for text in said if text and _LOST.search(text)][:2]

    def _first_moment(self) -> int:
        """When the earliest event of the recording began, in nanoseconds of its own clock."""
        firsts: list[int | None] = []
        for table in (*_WORK, _CUPTI + "RUNTIME", "NVTX_EVENTS"):
            if {"start", "end"} <= self._columns(table):
                first = f'select min(cast(start as integer)) from "{table}" where "end" >= start'
                firsts += self.database.execute(first).fetchone()
        return min(first for first in firsts if first is not None)

    def _columns(self, table: str) -> set[str]:
        return {row[1] for row in self.database.execute(f'pragma table_info("{table}")')}

    def _rows(self, table: str, source: _Source, *columns: str) -> Iterator[tuple[Any, ...]]:
        """The columns of the judged process and device, null where this version of the export lacks one."""
        present = self._columns(table)
        if not {"start", "end"} <= present:
            return
        wanted = ", ".join(self._value(c) if c in present else "null" for c in columns)
        chosen, given = ['"end" >= start'], list[int]()
        if source.process is not None and "globalPid" in present:
            chosen.append("globalPid = ?")
            given.append(source.process)
        if source.process is not None and "globalTid" in present:
            chosen.append(f"globalTid >> {_PROCESS} = ?")
            given.append(source.process >> _PROCESS)
        if source.device is not None and "deviceId" in present:
            chosen.append("deviceId = ?")
            given.append(source.device)
        yield from self.database.execute(f'select {wanted} from "{table}" where {" and ".join(chosen)}', given)

    def _value(self, column: str) -> str:
        """SQL for a column: times in microseconds from the first event, numbers whatever SQLite keeps in their place."""
        if column in ("start", "end"):
            return f'(cast("{column}" as integer) - {self.origin}) / 1e3'
        return f'"{column}"' if column in _NAMES else f'cast("{column}" as integer)'

    def _text(self, *identifiers: int | str | None) -> str:
        for i in identifiers:
            if isinstance(i, str):
                return i
            if i in self.strings:
                return self.strings[i]
        return "?"

    def _kernels(self, source: _Source) -> Iterator[DeviceOp]:
        columns = ("start", "end", "streamId", "correlationId", "demangledName", "shortName", "gridX", "gridY", "gridZ")
        for start, end, stream, correlation, long, short, *grid in self._rows(_CUPTI + "KERNEL", source, *columns):
            dims = tuple(int(g) for g in grid if g is not None)
            yield DeviceOp(self._text(long, short), start, end, stream or 0, "kernel", correlation, dims)

    def _copies(self, source: _Source) -> Iterator[DeviceOp]:
        columns = ("start", "end", "streamId", "correlationId", "copyKind", "bytes")
        for start, end, stream, correlation, kind, size in self._rows(_CUPTI + "MEMCPY", source, *columns):
            name = f"Memcpy {_COPIES.get(kind, '')}".strip()
            yield DeviceOp(name, start, end, stream or 0, "memcpy", correlation, (), size or 0)

    def _fills(self, source: _Source) -> Iterator[DeviceOp]:
        columns = ("start", "end", "streamId", "correlationId", "bytes")
        for start, end, stream, correlation, size in self._rows(_CUPTI + "MEMSET", source, *columns):
            yield DeviceOp("Memset", start, end, stream or 0, "memset", correlation, (), size or 0)

    def _graphs(self, source: _Source) -> Iterator[DeviceOp]:
        """Whole replays, where nsys ran with `--cuda-graph-trace=graph` (its default)."""
        columns = ("start", "end", "streamId", "correlationId", "graphId")
        for start, end, stream, correlation, graph in self._rows(_CUPTI + "GRAPH_TRACE", source, *columns):
            yield DeviceOp(f"CUDA graph {graph}", start, end, stream or 0, "graph", correlation)

    def _calls(self, source: _Source) -> Iterator[HostCall]:
        columns = ("start", "end", "globalTid", "nameId", "correlationId")
        known: dict[Any, tuple[str, CallKind]] = {}
        for start, end, thread, name_id, correlation in self._rows(_CUPTI + "RUNTIME", source, *columns):
            if name_id not in known:
                name = re.sub(r"(_ptsz|_ptds)?_v\d+$", "", self._text(name_id))  # nsys writes cudaLaunchKernel_v7000
                known[name_id] = name, call_kind(name)
            name, kind = known[name_id]
            if kind is not CallKind.OTHER:
                yield HostCall(name, start, end, thread or 0, kind, correlation)

    def _ranges(self, source: _Source) -> Iterator[HostRange]:
        columns = ("start", "end", "globalTid", "text", "textId", "eventType")
        for start, end, thread, text, text_id, event_type in self._rows("NVTX_EVENTS", source, *columns):
            if event_type is not None and event_type not in _RANGES:
                continue
            name = self._text(text or text_id, text_id)
            operator = _EMIT_NVTX.match(name)
            if operator:
                number = re.search(r"seq = (\d+)", name)
                backward = "Backward" in operator["op"]
                sequence = int(number[1]) if number else None
                yield HostRange(operator["op"], start, end, thread or 0, RangeKind.OP, sequence, backward)
            else:
                yield HostRange(name, start, end, thread or 0, range_kind(name))

    def _card(self, source: _Source) -> str:
        """Name of the judged device: a process numbers devices in its own way, and a table maps them."""
        if "name" not in self._columns("TARGET_INFO_GPU"):
            return ""
        cards = dict(self.database.execute("select id, name from TARGET_INFO_GPU"))
        device = source.device
        if {"gpuId", "cudaId", "pid"} <= self._columns("TARGET_INFO_CUDA_DEVICE"):
            mapped = self.database.execute("select cudaId, pid, gpuId from TARGET_INFO_CUDA_DEVICE").fetchall()
            device = next((gpu for cuda, pid, gpu in mapped if cuda == device and pid == source.pid), device)
        return str(cards.get(device) or next(iter(cards.values()), ""))


def _sorted(events: list[_T]) -> tuple[_T, ...]:
    """By start, outer ones first."""
    events.sort(key=lambda e: (e.start, -e.end))
    return tuple(events)
