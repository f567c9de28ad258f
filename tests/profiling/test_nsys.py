"""Nsight Systems exports, of versions with more and with fewer tables."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from graphlint.runtime.profiling import profile_file, read
from graphlint.runtime.profiling.chrome import UnreadableTrace
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
    with pytest.raises(UnreadableTrace, match="no Nsight Systems export"):
        read(path)


def test_nsights_own_format_says_how_to_export(tmp_path: Path) -> None:
    path = tmp_path / "report.nsys-rep"
    path.write_bytes(b"\x00" * 64)
    with pytest.raises(UnreadableTrace, match="nsys export --type sqlite"):
        read(path)
