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
from graphlint.runtime.profiling.chrome import UnreadableTrace
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
        ("hello", "no Chrome trace"),
        ("{}", "no Chrome trace"),
        ('{"traceEvents": [{"ph": ', "no Chrome trace"),
        ({"traceEvents": [LAUNCH]}, "no device work"),
        ("", "no Chrome trace"),
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
