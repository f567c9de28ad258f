"""Chrome traces: both forms of the format, those of other tools, and files that are none."""

from __future__ import annotations

import contextlib
import gzip
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest

from graphlint.runtime.profiling import profile_file, read
from graphlint.runtime.profiling.jsonfile import UnreadableTrace
from graphlint.runtime.profiling.timeline import CallKind, RangeKind, module_name

KERNEL = {
    "ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 20.5, "dur": 4,
    "args": {"correlation": 9, "stream": 7, "grid": [4, 1, 1]},
}  # fmt: skip
LAUNCH = {
    "ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "ts": 10, "dur": 5,
    "args": {"correlation": 9},
}  # fmt: skip


def write(folder: Path, content: Any) -> Path:
    path = folder / "trace.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_kernel_and_launch_share_a_correlation(tmp_path: Path) -> None:
    timeline = read(write(tmp_path, {"traceEvents": [KERNEL, LAUNCH], "deviceProperties": [{"name": "H200"}]}))
    (op,), (call,) = timeline.device, timeline.calls
    assert (op.start, op.end, op.stream, op.grid) == (20.5, 24.5, 7, (4, 1, 1))
    assert op.correlation == call.correlation == 9
    assert call.kind is CallKind.LAUNCH
    assert timeline.card == "H200"


def test_a_bare_list_may_lack_its_end(tmp_path: Path) -> None:
    text = "[" + json.dumps(KERNEL) + "," + json.dumps(LAUNCH) + ","
    assert len(read(write(tmp_path, text)).device) == 1


def test_gzip(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": [KERNEL]}).encode()))
    assert len(read(path).device) == 1


def test_begin_and_end_events_make_one_range(tmp_path: Path) -> None:
    begin = {"ph": "B", "cat": "user_annotation", "name": "ProfilerStep#3", "pid": 1, "tid": 1, "ts": 5}
    end = {"ph": "E", "pid": 1, "tid": 1, "ts": 35}
    (step,) = read(write(tmp_path, {"traceEvents": [KERNEL, begin, end]})).steps
    assert (step.name, step.start, step.end) == ("ProfilerStep#3", 5, 35)


def test_a_foreign_trace_is_told_by_its_lanes(tmp_path: Path) -> None:
    lane = {"ph": "M", "name": "process_name", "pid": "gpu", "args": {"name": "/device:GPU:0"}}
    op = {"ph": "X", "name": "fusion.7", "pid": "gpu", "tid": 1, "ts": 1, "dur": 2}
    timeline = read(write(tmp_path, {"traceEvents": [lane, op]}))
    assert [o.name for o in timeline.device] == ["fusion.7"]
    assert any("lanes" in note for note in timeline.notes)


def test_backward_operators_carry_the_number_of_their_forward_one(tmp_path: Path) -> None:
    forward = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1, "dur": 3,
               "args": {"Sequence number": 12, "Fwd thread id": 0}}  # fmt: skip
    backward = forward | {"name": "MmBackward0", "tid": 2, "ts": 9, "args": {"Sequence number": 12, "Fwd thread id": 1}}
    ranges = read(write(tmp_path, {"traceEvents": [KERNEL, forward, backward]})).ranges
    assert [(r.sequence, r.backward, r.kind) for r in ranges] == [(12, False, RangeKind.OP), (12, True, RangeKind.OP)]


def test_python_frames_are_left_out_but_modules_are_kept(tmp_path: Path) -> None:
    frame = {"ph": "X", "cat": "python_function", "name": "train.py(3): step", "pid": 1, "tid": 1, "ts": 1, "dur": 9}
    module = frame | {"name": "nn.Module: Block_0"}
    ranges = read(write(tmp_path, {"traceEvents": [KERNEL, frame, module]})).ranges
    assert [module_name(r.name) for r in ranges] == [("Block_0", "Block")]


def test_nested_modules_of_the_profiler_get_paths(tmp_path: Path) -> None:
    def module(name: str, ts: float, dur: float) -> dict[str, Any]:
        category = {"ph": "X", "cat": "python_function", "pid": 1, "tid": 1}
        return category | {"name": f"nn.Module: {name}", "ts": ts, "dur": dur}

    modules = [module("Net_0", 0, 100), module("Linear_0", 5, 20), module("Linear_1", 30, 20), module("Net_0", 200, 9)]
    ranges = read(write(tmp_path, {"traceEvents": [KERNEL, *modules]})).ranges
    assert [module_name(r.name)[0] for r in ranges] == ["Net_0", "Net_0.Linear_0", "Net_0.Linear_1", "Net_0"]


def test_of_several_devices_the_busiest_is_judged(tmp_path: Path) -> None:
    other = KERNEL | {"pid": 1, "dur": 90, "name": "busy"}
    timeline = read(write(tmp_path, {"traceEvents": [KERNEL, other]}))
    assert [o.name for o in timeline.device] == ["busy"] and "2 devices" in timeline.notes[0]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("hello", "no Chrome trace and no SQLite database"),
        ("{}", "no Chrome trace"),
        ('{"traceEvents": [{"ph": ', "no Chrome trace"),
        ({"traceEvents": [LAUNCH]}, "no device work"),
        ("", "the file is empty"),
        (" \n", "the file is empty"),
        ('{"traceEvents": 3}', "JSON, but no Chrome trace"),
        ('{"loss": [1, 2]}', "JSON, but no Chrome trace"),
        ('{"traceEvents": [}', "no Chrome trace"),
        ("[]", "no device work"),
    ],
)
def test_what_is_no_recording_is_one_clear_line(tmp_path: Path, content: Any, said: str) -> None:
    with pytest.raises(UnreadableTrace, match=said) as raised:
        read(write(tmp_path, content))
    assert "\n" not in str(raised.value)


def test_a_cut_gzip_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": [KERNEL]}).encode())[:30])
    with pytest.raises(UnreadableTrace, match="damaged"):
        read(path)


@pytest.mark.parametrize("args", ["[1, 2]", '"text"', "null", '{"correlation": "x", "grid": 3, "stream": null}'])
def test_odd_arguments_of_foreign_events_do_no_harm(tmp_path: Path, args: str) -> None:
    event = json.dumps({k: v for k, v in KERNEL.items() if k != "args"})[:-1] + f', "args": {args}}}'
    (op,) = read(write(tmp_path, f'{{"traceEvents": [{event}]}}')).device
    assert op.correlation is None


def test_no_field_of_any_event_can_make_it_crash() -> None:
    rng = random.Random(7)
    loaded = json.loads(gzip.decompress((Path(__file__).parent / "data" / "detection.json.gz").read_bytes()))
    odd = [None, -5, "x", 1e308, {}, [], "12", True, float("nan")]
    for _ in range(25):
        events = [dict(e) for e in loaded["traceEvents"]]
        for _ in range(rng.randint(1, 80)):
            rng.choice(events)[rng.choice(["ts", "dur", "args", "cat", "name", "pid", "tid", "ph"])] = rng.choice(odd)
        text = json.dumps(loaded | {"traceEvents": events})
        with tempfile.TemporaryDirectory() as folder, contextlib.suppress(UnreadableTrace):
            report = profile_file(write(Path(folder), text))
            assert report.to_text() and report.to_json() and report.to_html()


def steps(count: int, process: int = 1, device: int = 0, kernel: float = 4.0, **more: Any) -> list[dict[str, Any]]:
    """Marked steps of ten launches each, 20 us apart, by one process on one device."""
    events: list[dict[str, Any]] = []
    for step in range(count):
        begin = 1000.0 * step
        mark = {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step}", "pid": process, "tid": process}
        events.append(mark | {"ts": begin, "dur": 400.0})
        for k in range(10):
            at, number = begin + 20 * k, {"correlation": 1 + step * 10 + k} | more
            events.append(LAUNCH | {"pid": process, "tid": process, "ts": at, "args": number})
            events.append(KERNEL | {"pid": device, "ts": at + 8, "dur": kernel, "args": number | {"stream": 7}})
    return events


@pytest.mark.parametrize("where", [0.4, 0.7, 0.99])
@pytest.mark.parametrize("indent", [None, 2])
def test_of_a_trace_that_is_cut_short_the_whole_events_are_read(
    tmp_path: Path, where: float, indent: int | None
) -> None:
    text = json.dumps({"schemaVersion": 1, "traceEvents": steps(20)}, indent=indent)
    timeline = read(write(tmp_path, text[: int(len(text) * where)]))
    assert len(timeline.device) == pytest.approx(200 * where, abs=6)
    assert any("cut short" in note for note in timeline.notes)


def test_of_a_gzip_file_that_is_cut_short_too(tmp_path: Path) -> None:
    packed = gzip.compress(json.dumps({"traceEvents": steps(200)}).encode(), mtime=0)
    path = tmp_path / "trace.json.gz"
    path.write_bytes(packed[: len(packed) // 2])
    timeline = read(path)
    assert 200 < len(timeline.device) < 2000 and any("cut short" in note for note in timeline.notes)


def test_a_fault_in_the_middle_costs_only_what_comes_after(tmp_path: Path) -> None:
    text = json.dumps({"traceEvents": steps(20)})
    middle = text.index('"ph"', len(text) // 2)
    timeline = read(write(tmp_path, text[:middle] + '"broken": "a\nb" ' + text[middle:]))
    assert 80 < len(timeline.device) < 120 and any("damaged" in note for note in timeline.notes)


def test_numbers_and_letters_that_are_none_in_json(tmp_path: Path) -> None:
    odd = KERNEL | {"args": KERNEL["args"] | {"occupancy": float("nan"), "rate": float("-inf")}}
    path = tmp_path / "trace.json"
    path.write_bytes(json.dumps({"traceEvents": [odd]}).encode().replace(b"gemm", b"ge\xff\\ud800mm"))
    timeline = read(path)
    assert timeline.device[0].correlation == 9 and not timeline.notes


def test_categories_of_the_first_profilers(tmp_path: Path) -> None:
    old = [KERNEL | {"cat": "Kernel"}, LAUNCH | {"cat": "Runtime"}]
    operator = {"ph": "X", "cat": "Operator", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 9, "dur": 7}
    timeline = read(write(tmp_path, {"traceEvents": [*old, operator]}))
    assert len(timeline.device) == len(timeline.calls) == 1
    assert [r.kind for r in timeline.ranges] == [RangeKind.OP]


def test_of_several_ranks_in_one_trace_the_calls_of_the_judged_one_are_taken(tmp_path: Path) -> None:
    """Launches are numbered in each process on its own."""
    later = [e | {"ts": e["ts"] + 333} for e in steps(4, process=102, device=1, kernel=9.0)]
    path = write(tmp_path, {"traceEvents": [*steps(4, process=101, device=0), *later]})
    timeline = read(path)
    assert len(timeline.calls) == len(timeline.device) == 40 and len(timeline.steps) == 4
    assert any("2 devices" in n for n in timeline.notes) and any("process 102" in n for n in timeline.notes)
    assert profile_file(path).whole.nodes == 10


def test_one_process_with_two_devices_keeps_all_its_calls(tmp_path: Path) -> None:
    events = [*steps(4), *(KERNEL | {"pid": 1, "ts": 1000.0 * i, "args": {"correlation": 900 + i}} for i in range(4))]
    timeline = read(write(tmp_path, {"traceEvents": events}))
    assert len(timeline.calls) == 40 and not any("processes" in n for n in timeline.notes)


def test_without_correlations_launches_and_work_meet_by_the_number_of_their_operator(tmp_path: Path) -> None:
    events = steps(4)
    for e in events:
        if "args" in e:
            e["args"] = {"External id": e["args"]["correlation"] // 2, "stream": 7}  # two launches for each operator
    path = write(tmp_path, {"traceEvents": events})
    timeline = read(path)
    starts = {c.correlation: c.start for c in timeline.calls}
    assert [o.start - starts[o.correlation] for o in timeline.device] == [8.0] * 40
    assert any("tied to launches" in n for n in timeline.notes)
    assert profile_file(path).whole.nodes == 10


def test_without_any_number_the_work_belongs_to_the_step_it_ran_in(tmp_path: Path) -> None:
    events = [{k: v for k, v in e.items() if k != "args"} for e in steps(4)]
    report = profile_file(write(tmp_path, {"traceEvents": events}))
    assert report.whole.nodes == 10 and any("unknown" in n for n in report.notes)


def test_a_step_that_is_graphed_already(tmp_path: Path) -> None:
    """The kernels of a replay carry the number of the launch of their graph."""
    events: list[dict[str, Any]] = []
    for step in range(4):
        at = 1000.0 * step
        mark = {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step}", "pid": 1, "tid": 1}
        events.append(mark | {"ts": at, "dur": 500.0})
        events.append(LAUNCH | {"name": "cudaGraphLaunch", "ts": at + 5, "args": {"correlation": step + 1}})
        for k in range(50):
            args = {"correlation": step + 1, "stream": 7, "graph node id": k, "graph id": 3}
            events.append(KERNEL | {"ts": at + 20 + 9 * k, "dur": 8.5, "args": args})
    report = profile_file(write(tmp_path, {"traceEvents": events}))
    assert report.advice.headline.startswith("Graphed already: 100%") and report.whole.nodes == 50


def test_marks_of_the_profiler_on_the_device_and_flows_are_no_steps(tmp_path: Path) -> None:
    shadow = {"ph": "X", "cat": "gpu_user_annotation", "name": "ProfilerStep#0", "pid": 0, "tid": 7, "ts": 8, "dur": 90}
    flow = {"ph": "s", "id": 9, "pid": 1, "tid": 1, "ts": 10, "cat": "ac2g", "name": "ac2g"}
    sync = {"ph": "X", "cat": "cuda_sync", "name": "Stream Sync", "pid": 0, "tid": 7, "ts": 8, "dur": 500}
    timeline = read(write(tmp_path, {"traceEvents": [*steps(3), shadow, flow, flow | {"ph": "f"}, sync]}))
    assert len(timeline.steps) == 3 and len(timeline.device) == 30
