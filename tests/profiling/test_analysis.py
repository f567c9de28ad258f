"""Steps, launches, gaps and the model, on timelines made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from build import AUTOGRAD, HOST, Recorder, steady

from graphlint.runtime.profiling.analyse import Clock, analyse
from graphlint.runtime.profiling.costs import ReplayCosts
from graphlint.runtime.profiling.gaps import Cause, by_cause, gaps
from graphlint.runtime.profiling.launches import OPTIMIZER, OUTSIDE, launches
from graphlint.runtime.profiling.model import fit, simulate, whole_step
from graphlint.runtime.profiling.modules import changing_paths
from graphlint.runtime.profiling.report import Choice, Verdict
from graphlint.runtime.profiling.steps import cut, typical
from graphlint.runtime.profiling.timeline import (
    CallKind,
    DeviceOp,
    HostCall,
    HostRange,
    RangeKind,
    Timeline,
    call_kind,
    length,
    net_durations,
    range_kind,
)

COSTS = ReplayCosts(node_gap=0.5, eager_gap=1.0, replay=5.0, replay_per_node=0.0, module_call=20.0, launch_latency=2.0)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("cudaLaunchKernelExC", CallKind.LAUNCH),
        ("cuLaunchKernelEx", CallKind.LAUNCH),
        ("hipLaunchKernel", CallKind.LAUNCH),
        ("cudaMemcpyAsync", CallKind.LAUNCH),
        ("cudaMemcpy", CallKind.WAIT),
        ("cudaGraphLaunch", CallKind.GRAPH),
        ("cudaEventSynchronize", CallKind.WAIT),
        ("cudaStreamWaitEvent", CallKind.OTHER),
        ("cudaFree", CallKind.ALLOC),
        ("cudaLaunchHostFunc", CallKind.OTHER),
        ("cudaEventRecord", CallKind.OTHER),
    ],
)
def test_call_kinds(name: str, kind: CallKind) -> None:
    assert call_kind(name) is kind


def test_work_beside_other_work_counts_once() -> None:
    ops = [DeviceOp("a", 0, 10, 7), DeviceOp("b", 4, 8, 8), DeviceOp("c", 9, 15, 8)]
    assert length((o.start, o.end) for o in ops) == 15
    assert [net for _, net in net_durations(ops)] == [10, 0, 5]


def test_device_work_belongs_to_the_step_that_launched_it() -> None:
    steps, notes = cut(steady(kernels=4, device=100, host=10, steps=3))
    assert [len(s.ops) for s in steps] == [4, 4, 4] and not notes
    assert steps[1].ops[0].start > steps[1].end  # the device lags behind, and the work is still step 1's
    assert steps[1].busy == 400


def test_steps_without_marks_end_with_the_optimizer() -> None:
    recorder = Recorder()
    for _ in range(3):
        recorder.launch(5)
        start = recorder.host
        recorder.launch(5)
        recorder.mark("Optimizer.step#Adam.step", start, RangeKind.OPTIMIZER)
    steps, notes = cut(recorder.timeline())
    assert [len(s.ops) for s in steps] == [2, 2]
    assert "Optimizer.step" in notes[0]


def test_steps_by_a_name_of_the_user() -> None:
    recorder = Recorder()
    for i in range(2):
        start = recorder.host
        recorder.launch(5)
        recorder.mark(f"iteration {i}", start, RangeKind.MARK)
    assert len(cut(recorder.timeline(), "iteration")[0]) == 2
    with pytest.raises(
        ValueError, match=r"no range of by hand begins with 'epoch'; those that repeat: iteration \(2\)"
    ):
        cut(recorder.timeline(), "epoch")


def _named(*names: str, steps: int = 4) -> Timeline:
    """In each step two launches in a range for each name, the later ranges inside the earlier ones."""
    recorder = Recorder()
    for number in range(steps):
        starts = [recorder.host for _ in names]
        recorder.launch(5)
        for name, start in reversed(list(zip(names, starts, strict=True))):
            recorder.launch(5)
            recorder.mark(name.format(number), start, range_kind(name))
    return recorder.timeline()


@pytest.mark.parametrize(
    "name", ["step {}", "train_step", "iteration={}", "[pl][profile]run_training_batch", "Train Step #{}", "iter{}"]
)
def test_ranges_that_are_called_like_a_step_are_taken_for_one(name: str) -> None:
    steps, notes = cut(_named(name))
    assert len(steps) == 4 and "--step-range" in notes[0]


@pytest.mark.parametrize("name", ["optimizer_step", "forward {}", "backward step", "load batch", "epoch {}"])
def test_other_ranges_are_only_proposed(name: str) -> None:
    steps, notes = cut(_named(name))
    assert len(steps) == 1 and f"for --step-range: {name.removesuffix(' {}')} (4)" in notes[0]


def test_ranges_of_libraries_are_not_proposed() -> None:
    note = cut(_named("generate", "ncclAllReduce"))[1][0]
    assert note.endswith("for --step-range: generate (4)")


def test_of_nested_ranges_the_outer_one_is_the_step() -> None:
    steps, notes = cut(_named("step {}", "micro_batch"))
    assert [len(s.ops) for s in steps] == [3, 3, 3, 3] and "named step " in notes[0]


def test_a_name_means_that_range_and_not_what_begins_like_it() -> None:
    timeline = _named("step", "step_forward")
    assert [s.name for s in cut(timeline, "step")[0]] == ["step"] * 4
    assert [s.name for s in cut(timeline, "step_f")[0]] == ["step_forward"] * 4


def test_fetching_a_batch_inside_a_step_is_not_the_launches_fault() -> None:
    r = Recorder()
    for number in range(4):
        begin = r.host
        r.idle(2000)
        r.mark("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", begin, RangeKind.DATA)
        for _ in range(10):
            r.launch(40, host=10)
        r.mark(f"ProfilerStep#{number}", begin, RangeKind.STEP)
    report = analyse(r.timeline(), COSTS)
    assert report.whole.outside > 1500 and report.whole.share < 0.10
    assert report.whole.host == pytest.approx(100, rel=0.1)
    assert report.advice.verdict is Verdict.NOT_WORTH and "a batch is fetched" in " ".join(report.advice.points)


def _nested() -> Timeline:
    """A module with an inner one, its backward on autograd's thread, an optimizer, and a loss outside."""
    r = Recorder()
    for number in range(2):
        begin = r.host
        outer = r.host
        r.launch(5)
        inner = r.host
        r.launch(5)
        r.mark("aten::mm", inner, RangeKind.OP, sequence=number * 10)
        r.module("model.inner", "Linear", inner)
        r.module("model", "Net", outer)
        r.launch(5)  # the loss
        r.thread = AUTOGRAD
        back = r.host
        r.launch(5)
        r.mark("MmBackward0", back, RangeKind.OP, sequence=number * 10, backward=True)
        r.thread = HOST
        update = r.host
        r.launch(5)
        r.mark("Optimizer.step#SGD.step", update, RangeKind.OPTIMIZER)
        r.step(number, begin)
    return r.timeline()


def test_each_launch_knows_its_module_and_phase() -> None:
    step = cut(_nested())[0][1]
    assert [(x.path, x.backward) for x in launches(step)] == [
        ("model", False),
        ("model.inner", False),
        (OUTSIDE, False),
        ("model.inner", True),
        (OPTIMIZER, False),
    ]


def test_a_module_counts_its_backward_and_its_parts() -> None:
    rows = {m.path: m for m in analyse(_nested(), COSTS).modules}
    assert rows["model"].nodes == 3 and rows["model.inner"].nodes == 2
    assert rows["model"].kind == "Net"


def test_launch_gaps() -> None:
    step = typical(cut(steady(kernels=10, device=3, host=20))[0])
    causes = by_cause(gaps(step))
    assert set(causes) == {Cause.LAUNCH}
    assert causes[Cause.LAUNCH] == pytest.approx(10 * (20 - 3))


def test_a_busy_device_has_only_its_own_gaps() -> None:
    step = cut(steady(kernels=10, device=50, host=10))[0][2]
    assert by_cause(gaps(step)) == {Cause.DEVICE: pytest.approx(10)}


def test_a_wait_is_the_cause_of_the_gap_behind_it() -> None:
    r = Recorder()
    for number in range(3):
        begin = r.host
        r.launch(100)
        r.wait()
        r.launch(100)
        r.step(number, begin)
    found = gaps(cut(r.timeline())[0][1])
    assert found[-1].cause is Cause.WAIT and found[-1].call == "cudaStreamSynchronize"


def test_an_allocation_is_a_cause_too() -> None:
    r = Recorder()
    r.launch(5)
    r.calls.append(HostCall("cudaMalloc", r.host, r.host + 300, HOST, CallKind.ALLOC, None))
    r.idle(300)
    r.launch(5)
    r.step(0, 0.0)
    assert gaps(cut(r.timeline())[0][0])[-1].cause is Cause.ALLOC


def test_time_between_steps_is_not_the_steps_fault() -> None:
    r = Recorder()
    for number in range(4):
        r.idle(1000)  # loading data
        begin = r.host
        for _ in range(10):
            r.launch(20, host=5)
        r.step(number, begin)
    report = analyse(r.timeline(), COSTS)
    assert report.whole.outside > 800  # the device worked for 160 of the 1000
    assert report.whole.share < 0.10
    assert "data loading" in " ".join(report.advice.points)


def test_one_graph_is_device_time_and_short_gaps() -> None:
    assert whole_step(device=1000, nodes=100, costs=COSTS) == 1050
    assert whole_step(device=1, nodes=4, costs=COSTS) == 5.0  # never below the launch itself


def test_the_model_takes_the_slower_side() -> None:
    launch_bound = launches(typical(cut(steady(kernels=50, device=2, host=10))[0]))
    device_bound = launches(typical(cut(steady(kernels=50, device=40, host=10))[0]))
    assert simulate(launch_bound, COSTS) == pytest.approx(500, rel=0.02)
    assert simulate(device_bound, COSTS) == pytest.approx(50 * 41, rel=0.02)


def test_capturing_everything_in_the_model_leaves_the_device_time() -> None:
    sequence = launches(typical(cut(steady(kernels=50, device=2, host=10))[0]))
    assert simulate(sequence, COSTS, captured=lambda _: "all") == pytest.approx(50 * 2.5, rel=0.05)


def test_the_host_scale_is_fitted_to_the_wall_time() -> None:
    sequence = launches(typical(cut(steady(kernels=50, device=2, host=10))[0]))
    scale = fit(sequence, COSTS, wall=250, guess=1.0)
    assert simulate(sequence, COSTS, scale) == pytest.approx(250, rel=0.01)
    busy = launches(typical(cut(steady(kernels=50, device=40, host=10))[0]))
    assert fit(busy, COSTS, wall=50 * 41, guess=0.6) == 0.6  # a device-bound loop says nothing about the host


def test_a_wait_in_the_loop_keeps_host_and_device_apart() -> None:
    def timeline(wait: bool) -> Timeline:
        r = Recorder()
        for number in range(4):
            begin = r.host
            for _ in range(10):
                r.launch(10, host=10)
            if wait:
                r.wait()
            r.step(number, begin)
        return r.timeline()

    def wall(timeline: Timeline) -> float:
        return simulate(launches(typical(cut(timeline)[0])), COSTS)

    assert wall(timeline(wait=True)) > wall(timeline(wait=False))


def test_shapes_that_change_name_the_module() -> None:
    r = Recorder()
    for number in range(3):
        begin = r.host
        for path in ("model.fixed", "model.open"):
            start = r.host
            r.launch(5, grid=(number + 1 if path.endswith("open") else 1, 1, 1))
            r.module(path, "Linear", start)
        r.step(number, begin)
    steps = cut(r.timeline())[0]
    assert changing_paths(steps) == {"model", "model.open"}


def test_the_true_wall_time_corrects_a_recording() -> None:
    timeline = steady(kernels=100, device=5, host=20)
    recorded, corrected = analyse(timeline, COSTS), analyse(timeline, COSTS, Clock(wall=1000))
    assert recorded.whole.gain > corrected.whole.gain
    assert corrected.whole.share == pytest.approx(0.5)
    assert any("--wall-us" in note for note in recorded.notes)


def test_a_compute_bound_part_is_left_out_and_the_rest_captured() -> None:
    r = Recorder()
    for number in range(3):
        begin = r.host
        for _ in range(12):
            r.launch(50, host=10)
        r.module("model.trunk", "Conv", begin)
        start = r.host
        for _ in range(200):
            r.launch(2, host=10)
        r.module("model.head", "Head", start)
        r.module("model", "Net", begin)
        r.step(number, begin)
    rows = {m.path: m.choice for m in analyse(r.timeline(), COSTS).modules}
    assert rows == {"model": Choice.OPEN, "model.head": Choice.CAPTURE, "model.trunk": Choice.LEAVE}


def test_a_captured_module_gains_its_launch_bound_share_only() -> None:
    """The trunk's 12 x (50 + 1) us of device time and the head's 200 x (2 + 0.5) in its graph are what is left."""
    r = Recorder()
    for number in range(3):
        begin = r.host
        for _ in range(12):
            r.launch(50, host=10)
        r.module("trunk", "Conv", begin)
        start = r.host
        for _ in range(200):
            r.launch(2, host=10)
        r.module("head", "Head", start)
        r.step(number, begin)
    rows = {m.path: m.step_gain for m in analyse(r.timeline(), COSTS).modules}
    assert rows["head"] == pytest.approx(212 * 10 / (12 * 51 + 200 * 2.5), rel=0.02)
    assert rows["trunk"] == pytest.approx(212 * 10 / (200 * 10 + 10 + COSTS.module_call), rel=0.02)


def test_a_graph_does_not_take_the_work_around_it_off_the_host() -> None:
    """Two equal modules: with one captured the host still launches the other, and waits no less for its own Python."""
    r = Recorder()
    for number in range(3):
        begin = r.host
        for name in ("one", "two"):
            start = r.host
            for _ in range(100):
                r.launch(1, host=10)
            r.module(name, "Block", start)
        r.step(number, begin)
    rows = {m.path: m.step_gain for m in analyse(r.timeline(), COSTS).modules}
    assert rows["one"] == rows["two"] == pytest.approx(2000 / (1000 + 10 + COSTS.module_call), rel=0.02)


def test_a_graph_launched_already_is_recognised() -> None:
    calls = tuple(HostCall("cudaGraphLaunch", 100.0 * i, 100.0 * i + 5, HOST, CallKind.GRAPH, i) for i in range(3))
    ops = tuple(
        DeviceOp("k", 100.0 * i + 10 + j, 100.0 * i + 10.6 + j, 7, "kernel", i) for i in range(3) for j in range(20)
    )
    marks = tuple(HostRange(f"ProfilerStep#{i}", 100.0 * i, 100.0 * i + 90, HOST, RangeKind.STEP) for i in range(3))
    report = analyse(Timeline("graphs", calls, marks, ops), COSTS)
    assert report.advice.headline.startswith("Graphed already: 100%")
    assert report.advice.verdict is Verdict.NOT_WORTH


def test_streams_that_overlap_are_not_idle() -> None:
    timeline = steady(kernels=20, device=30, host=10)
    other = tuple(replace(o, stream=8) if i % 2 else o for i, o in enumerate(timeline.device))
    assert analyse(replace(timeline, device=other), COSTS).whole.share < 0.10


def _stepwise(shapes: list[int]) -> Timeline:
    r = Recorder()
    for number, size in enumerate(shapes):
        begin = r.host
        for _ in range(20):
            r.launch(2, grid=(size, 1, 1))
        r.step(number, begin)
    return r.timeline()


def test_one_odd_step_among_many_is_left_out_and_told() -> None:
    report = analyse(_stepwise([9, 1, 1, 1, 1, 1]), COSTS)
    assert not report.advice.blocked and report.steps == 6
    assert any("1 of 6 steps launch other kernels" in n for n in report.notes)


@pytest.mark.parametrize("shapes", [[1, 2, 3, 1, 2, 3], [1, 1, 1, 2, 3, 4], [1, 1, 2]])
def test_sizes_that_keep_changing_are_no_odd_steps(shapes: list[int]) -> None:
    report = analyse(_stepwise(shapes), COSTS)
    assert report.advice.blocked and "Pad" in report.advice.points[0]


def test_a_device_that_waits_with_a_full_queue_is_not_put_down_to_the_host() -> None:
    timeline = steady(kernels=20, device=30, host=5)
    late = tuple(replace(o, start=o.start + 200 * i, end=o.end + 200 * i) for i, o in enumerate(timeline.device))
    said = " ".join(analyse(replace(timeline, device=late), COSTS).advice.points)
    assert "idled with work in its queue" in said


def test_collectives_are_named() -> None:
    timeline = steady(kernels=20, device=30, host=5)
    ops = tuple(
        replace(o, name="ncclDevKernel_AllReduce_Sum_bf16_RING") if i % 2 else o for i, o in enumerate(timeline.device)
    )
    assert "50% of the device time are collectives" in " ".join(
        analyse(replace(timeline, device=ops), COSTS).advice.points
    )
    assert "collectives" not in " ".join(analyse(timeline, COSTS).advice.points)


def _waiting(thread: int, operator: str = "") -> Timeline:
    r = Recorder()
    for number in range(3):
        begin = r.host
        for _ in range(20):
            r.launch(5)
        start = r.host
        r.thread = thread
        r.wait()
        if operator:
            r.mark(operator, start, RangeKind.OP)
        r.thread = HOST
        r.step(number, begin)
    return r.timeline()


def test_waits_of_the_step_block_a_capture_and_those_of_other_threads_do_not() -> None:
    assert analyse(_waiting(HOST), COSTS).advice.blocked
    report = analyse(_waiting(77), COSTS)  # a thread that launches nothing: it pins memory, or watches collectives
    assert not report.advice.blocked and Cause.WAIT.value not in {i.cause for i in report.idle}


def test_a_wait_of_the_allocator_is_none_in_the_pool_of_a_graph() -> None:
    assert analyse(_waiting(HOST, "aten::item"), COSTS).advice.blocked
    assert not analyse(_waiting(HOST, "aten::empty_strided"), COSTS).advice.blocked
