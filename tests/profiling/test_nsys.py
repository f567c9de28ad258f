"""Nsight Systems exports, of versions with more and with fewer tables."""

from __future__ import annotations

import contextlib
import random
import sqlite3
from pathlib import Path

import pytest

from graphlint.runtime.profiling import profile_file, read
from graphlint.runtime.profiling.jsonfile import UnreadableTrace
from graphlint.runtime.profiling.timeline import CallKind

THREAD = 281479271743488  # a serialised process and thread
STEP, KERNELS = 1_000_000, 5  # nanoseconds


def export(path: Path, nvtx: bool = True, stream_column: bool = True) -> Path:
    """Three steps of five kernels; the host takes 100 us for each launch, the device 10 us for each kernel."""
    with sqlite3.connect(path) as db:
        stream = "streamId INT, " if stream_column else ""
        db.executescript(f"""
            create table StringIds (id integer primary key, value text not null);
            insert into StringIds values (1, 'cudaLaunchKernel_v7000'), (2, 'void gemm<float>(float*)'), (3, 'gemm'),
                (4, 'cudaStreamSynchronize_v3020'), (5, 'step');
            create table CUPTI_ACTIVITY_KIND_KERNEL (start int not null, end int not null, deviceId int, {stream}
                correlationId int, demangledName int, shortName int, gridX int, gridY int, gridZ int);
            create table CUPTI_ACTIVITY_KIND_RUNTIME (start int not null, end int not null, eventClass int,
                globalTid int, correlationId int, nameId int);
            create table TARGET_INFO_GPU (id int, name text);
            insert into TARGET_INFO_GPU values (0, 'NVIDIA H100');
        """)
        if nvtx:
            db.execute(
                "create table NVTX_EVENTS (start int, end int, eventType int, text text, textId int, globalTid int)"
            )
        for step in range(3):
            begin = 5_000_000_000 + step * STEP
            for k in range(KERNELS):
                at, number = begin + (k + 1) * 100_000, step * KERNELS + k
                db.execute(
                    "insert into CUPTI_ACTIVITY_KIND_RUNTIME values (?, ?, 0, ?, ?, 1)", (at - 5000, at, THREAD, number)
                )
                kernel = (at + 2000, at + 12_000, 0, *([7] if stream_column else []), number, 2, 3, 4, 1, 1)
                marks = ", ".join("?" * len(kernel))
                db.execute(f"insert into CUPTI_ACTIVITY_KIND_KERNEL values ({marks})", kernel)
            if nvtx:
                row = (begin, begin + STEP - 1000, 59, "graphlint.step#" + str(step), None, THREAD)
                db.execute("insert into NVTX_EVENTS values (?, ?, ?, ?, ?, ?)", row)
        if nvtx:  # marks that are no ranges, and a range whose text is in the string table
            db.execute("insert into NVTX_EVENTS values (1, null, 34, 'a mark', null, ?)", (THREAD,))
            db.execute("insert into NVTX_EVENTS values (5000000000, 5000500000, 59, null, 5, ?)", (THREAD,))
    return path


def test_kernels_calls_and_ranges(tmp_path: Path) -> None:
    timeline = read(export(tmp_path / "report.sqlite"))
    assert len(timeline.device) == len(timeline.calls) == 15
    assert timeline.calls[0].name == "cudaLaunchKernel" and timeline.calls[0].kind is CallKind.LAUNCH
    assert timeline.device[0].name == "void gemm<float>(float*)" and timeline.device[0].duration == 10
    assert timeline.ranges[0].start == 0.0  # nanoseconds since the machine's start become microseconds from here
    assert len(timeline.steps) == 3 and "step" in [r.name for r in timeline.ranges]
    assert timeline.card == "NVIDIA H100"


def test_a_launch_bound_export_is_called_so(tmp_path: Path) -> None:
    report = profile_file(export(tmp_path / "report.sqlite"))
    assert report.whole.nodes == KERNELS
    assert report.whole.wall == pytest.approx(1000, rel=0.01)
    assert report.whole.device == pytest.approx(50)
    assert report.advice.headline.startswith("Do this first")


def test_an_export_without_ranges_counts_as_one_step(tmp_path: Path) -> None:
    report = profile_file(export(tmp_path / "report.sqlite", nvtx=False))
    assert report.steps == 1
    assert any("NVTX" in note for note in report.notes)


def test_a_column_that_another_version_lacks(tmp_path: Path) -> None:
    assert {o.stream for o in read(export(tmp_path / "report.sqlite", stream_column=False)).device} == {0}


def test_operators_of_emit_nvtx(tmp_path: Path) -> None:
    path = export(tmp_path / "report.sqlite")
    with sqlite3.connect(path) as db:
        row = "insert into NVTX_EVENTS values (5000000000, 5000090000, 59, ?, null, 1)"
        db.execute(row, ("aten::mm, seq = 17, op_id = 3",))
        db.execute(row, ("autograd::engine::evaluate_function: MmBackward0, seq = 17, op_id = 9",))
    forward, backward = (r for r in read(path).ranges if r.sequence == 17)
    assert (forward.name, forward.backward) == ("aten::mm", False)
    assert backward.backward


def test_an_empty_export(tmp_path: Path) -> None:
    path = tmp_path / "empty.sqlite"
    with sqlite3.connect(path) as db:
        db.execute("create table StringIds (id int, value text)")
    with pytest.raises(UnreadableTrace, match="no CUDA work"):
        read(path)


def test_a_damaged_database(tmp_path: Path) -> None:
    path = export(tmp_path / "report.sqlite")
    path.write_bytes(path.read_bytes()[:4096] + b"\xff" * 5000)
    with pytest.raises(UnreadableTrace, match="damaged or cut short"):
        read(path)


def test_nsights_own_format_says_how_to_export(tmp_path: Path) -> None:
    path = tmp_path / "report.nsys-rep"
    path.write_bytes(b"\x00" * 64)
    with pytest.raises(UnreadableTrace, match="nsys export --type sqlite"):
        read(path)


RANK = 1 << 24  # of a serialised process or thread: what lies above is machine and process
SCHEMA = """
    create table StringIds (id integer primary key, value text not null);
    create table META_DATA_EXPORT (name text not null, value text);
    create table TARGET_INFO_GPU (vmId integer, id integer, name text, cuDevice integer);
    create table TARGET_INFO_CUDA_DEVICE (gpuId integer, cudaId integer, pid integer, uuid text);
    create table CUPTI_ACTIVITY_KIND_KERNEL (start integer not null, end integer not null, deviceId integer,
        contextId integer, greenContextId integer, streamId integer, correlationId integer, globalPid integer,
        demangledName integer, shortName integer, mangledName integer, launchType integer, gridX integer,
        gridY integer, gridZ integer, graphNodeId integer);
    create table CUPTI_ACTIVITY_KIND_MEMCPY (start integer not null, end integer not null, deviceId integer,
        streamId integer, correlationId integer, globalPid integer, bytes integer, copyKind integer, srcKind integer,
        dstKind integer, graphNodeId integer);
    create table CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start integer not null, end integer not null, deviceId integer,
        contextId integer, streamId integer, correlationId integer, globalPid integer, graphId integer,
        graphExecId integer);
    create table CUPTI_ACTIVITY_KIND_RUNTIME (start integer not null, end integer not null, eventClass integer,
        globalTid integer, correlationId integer, nameId integer, returnValue integer, callchainId integer);
    create table NVTX_EVENTS (start integer not null, end integer, eventType integer not null, rangeId integer,
        text text, globalTid integer, endGlobalTid integer, textId integer, domainId integer, jsonText text);
    create table DIAGNOSTIC_EVENT (timestamp integer, severity integer, text text, globalPid integer);
    insert into StringIds values (1, 'cudaLaunchKernel_v7000'), (2, 'gemm'), (3, 'cudaGraphLaunch_v10000'),
        (4, 'cudaMemcpyAsync_v3020'), (5, 'train_step');
    insert into META_DATA_EXPORT values ('EXPORT_SCHEMA_VERSION', '3.16.1');
    insert into TARGET_INFO_GPU values (0, 0, 'display card', 0), (0, 1, 'NVIDIA H100', 1), (0, 2, 'NVIDIA H200', 2);
    insert into TARGET_INFO_CUDA_DEVICE values (1, 0, 71, ''), (2, 0, 72, '');
"""


def process(pid: int) -> int:
    """Serialised as in a report that merges machines: bits above the process number are set."""
    return (1 << 56) + pid * RANK


def ranks(path: Path, pids: tuple[int, ...] = (71, 72), kernel: int = 10_000) -> Path:
    """Each process calls its device 0, and counts its launches from 1; the later ones work longer."""
    with sqlite3.connect(path) as db:
        db.executescript(SCHEMA)
        for place, pid in enumerate(pids):
            thread, work = process(pid) + pid, kernel * (place + 1)
            for step in range(4):
                begin = 10**9 + step * STEP
                db.execute(
                    "insert into NVTX_EVENTS (start, end, eventType, globalTid, textId, domainId) values (?,?,59,?,5,0)",
                    (begin, begin + STEP - 1000, thread),
                )
                for k in range(KERNELS):
                    at, number = begin + (k + 1) * 100_000, 1 + step * KERNELS + k
                    call = (at - 5000, at, thread, number)
                    db.execute("insert into CUPTI_ACTIVITY_KIND_RUNTIME values (?, ?, 0, ?, ?, 1, 0, null)", call)
                    db.execute(
                        "insert into CUPTI_ACTIVITY_KIND_KERNEL (start, end, deviceId, streamId, correlationId,"
                        " globalPid, demangledName, shortName, gridX, gridY, gridZ) values (?,?,0,7,?,?,2,2,4,1,1)",
                        (at + 2000, at + 2000 + work, number, process(pid)),
                    )
    return path


def test_of_several_processes_one_is_judged_with_its_own_calls(tmp_path: Path) -> None:
    path = ranks(tmp_path / "report.sqlite")
    timeline = read(path)
    assert len(timeline.device) == len(timeline.calls) == 4 * KERNELS  # numbers of launches repeat in each process
    assert {o.duration for o in timeline.device} == {20.0} and {c.thread for c in timeline.calls} == {process(72) + 72}
    assert timeline.card == "NVIDIA H200"  # device 0 of that process is the machine's card 2
    assert "2 processes with 2 devices" in timeline.notes[0] and "device 0 of process 72" in timeline.notes[0]
    report = profile_file(path, mark="train_step")
    assert report.steps == 4 and report.whole.device == pytest.approx(100)


def test_replays_as_whole_graphs_and_as_nodes(tmp_path: Path) -> None:
    """`--cuda-graph-trace=graph` records a replay as one row, `=node` as its kernels, all of them under one launch."""
    for how in ("graph", "node"):
        path = ranks(tmp_path / f"{how}.sqlite", pids=(71,))
        with sqlite3.connect(path) as db:
            db.execute("delete from CUPTI_ACTIVITY_KIND_KERNEL")
            db.execute("delete from CUPTI_ACTIVITY_KIND_RUNTIME")
            for step in range(4):
                at = 10**9 + step * STEP + 100_000
                call = (at - 9000, at, process(71) + 71, step + 1)
                db.execute("insert into CUPTI_ACTIVITY_KIND_RUNTIME values (?, ?, 0, ?, ?, 3, 0, null)", call)
                for k in range(40 if how == "node" else 0):
                    row = (at + 2000 + k * 5000, at + 6000 + k * 5000, step + 1, process(71), k)
                    db.execute(
                        "insert into CUPTI_ACTIVITY_KIND_KERNEL (start, end, deviceId, streamId, correlationId,"
                        " globalPid, demangledName, graphNodeId) values (?,?,0,13,?,?,2,?)",
                        row,
                    )
                if how == "graph":
                    row2 = (at + 2000, at + 200_000, step + 1, process(71))
                    db.execute("insert into CUPTI_ACTIVITY_KIND_GRAPH_TRACE values (?, ?, 0, 1, 13, ?, ?, 9, 10)", row2)
        report = profile_file(path, mark="train_step")
        assert report.advice.headline.startswith("Graphed already: 100%"), how


def test_one_replay_beside_a_few_kernels_is_graphed_by_its_time_and_not_by_its_rows(tmp_path: Path) -> None:
    path = ranks(tmp_path / "report.sqlite", pids=(71,))
    with sqlite3.connect(path) as db:
        for step in range(4):
            at = 10**9 + step * STEP + 600_000
            call = (at - 9000, at, process(71) + 71, 1000 + step)
            db.execute("insert into CUPTI_ACTIVITY_KIND_RUNTIME values (?, ?, 0, ?, ?, 3, 0, null)", call)
            db.execute(
                "insert into CUPTI_ACTIVITY_KIND_GRAPH_TRACE values (?, ?, 0, 1, 13, ?, ?, 9, 10)",
                (at + 2000, at + 300_000, 1000 + step, process(71)),
            )
    assert profile_file(path, mark="train_step").advice.headline.startswith("Graphed already: 86%")


def test_ranges_that_never_end_and_marks_are_left_out(tmp_path: Path) -> None:
    path = ranks(tmp_path / "report.sqlite", pids=(71,))
    thread = process(71) + 71
    with sqlite3.connect(path) as db:
        for row in [(5, None, 59, "open"), (5, 0, 59, "default end"), (5, 9, 34, "mark"), (5, None, 75, "NCCL")]:
            db.execute(
                "insert into NVTX_EVENTS (start, end, eventType, text, globalTid) values (?, ?, ?, ?, ?)",
                (*row, thread),
            )
        db.execute(
            "insert into NVTX_EVENTS (start, end, eventType, text, globalTid) values (5, 9, 60, 'across', ?)", (thread,)
        )
    assert {r.name for r in read(path).ranges} == {"train_step", "across"}


def test_what_nsight_says_about_lost_events_is_passed_on(tmp_path: Path) -> None:
    path = ranks(tmp_path / "report.sqlite", pids=(71,))
    with sqlite3.connect(path) as db:
        db.execute("insert into DIAGNOSTIC_EVENT values (1, 2, 'Profiling has started.', 0)")
        db.execute("insert into DIAGNOSTIC_EVENT values (2, 3, 'Not all CUDA events have been collected.', 0)")
    assert [n for n in read(path).notes if n.startswith("Nsight")] == [
        "Nsight Systems says: Not all CUDA events have been collected."
    ]


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("create table users (id int)", "no export of Nsight Systems"),
        ("create table StringTable (_id_ int, value text)", "nvprof"),
        ("create table StringIds (id int, value text)", "no CUDA work"),
        (
            "create table StringIds (id int, value text); create table CUPTI_ACTIVITY_KIND_RUNTIME (start int, end int)",
            "CUDA calls but no device work",
        ),
        ("create table CUPTI_ACTIVITY_KIND_KERNEL (foo int); create table StringIds (id int)", "no CUDA work"),
    ],
)
def test_what_is_no_export_is_one_clear_line(tmp_path: Path, script: str, said: str) -> None:
    path = tmp_path / "other.sqlite"
    with sqlite3.connect(path) as db:
        db.executescript(script)
    with pytest.raises(UnreadableTrace, match=said) as raised:
        read(path)
    assert "\n" not in str(raised.value)


def test_an_export_without_the_hosts_calls_owns_up_to_it(tmp_path: Path) -> None:
    path = ranks(tmp_path / "report.sqlite", pids=(71,))
    with sqlite3.connect(path) as db:
        db.execute("drop table CUPTI_ACTIVITY_KIND_RUNTIME")
    report = profile_file(path, mark="train_step")
    assert report.steps == 4 and any("what the host did is unknown" in n for n in report.notes)


def test_names_that_a_url_would_read_otherwise(tmp_path: Path) -> None:
    assert read(export(tmp_path / "run #3?mode=memory%20.sqlite")).device


def test_no_cut_of_an_export_makes_it_crash(tmp_path: Path) -> None:
    whole = ranks(tmp_path / "report.sqlite").read_bytes()
    for part in range(1, 12):
        path = tmp_path / f"{part}.sqlite"
        path.write_bytes(whole[: len(whole) * part // 12])
        with contextlib.suppress(UnreadableTrace):
            profile_file(path)


def test_no_value_of_any_column_can_make_it_crash(tmp_path: Path) -> None:
    """SQLite keeps anything in any column."""
    rng, odd = random.Random(11), [None, -1, "text", "", 1 << 62, 0, 1.5, b"\xff", "12"]
    whole = ranks(tmp_path / "whole.sqlite").read_bytes()
    with sqlite3.connect(tmp_path / "whole.sqlite") as db:
        tables = [row[0] for row in db.execute("select name from sqlite_master where type = 'table'")]
        columns = {t: [(c[1], c[3]) for c in db.execute(f"pragma table_info({t})")] for t in tables}
    for turn in range(40):
        path = tmp_path / f"{turn}.sqlite"
        path.write_bytes(whole)
        with sqlite3.connect(path) as db:
            for _ in range(rng.randint(1, 12)):
                table = rng.choice(tables)
                column, needed = rng.choice(columns[table])
                value = rng.choice(odd[1:] if needed else odd)
                with contextlib.suppress(sqlite3.IntegrityError):
                    some = f"rowid % {rng.randint(1, 9)} = 0"
                    db.execute(f'update "{table}" set "{column}" = ? where {some}', (value,))
        with contextlib.suppress(ValueError):  # also: no step did device work
            report = profile_file(path)
            assert report.to_text() and report.to_json() and report.to_html()
