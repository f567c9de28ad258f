"""Text, JSON and page of a report."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from build import Recorder, steady

from graphlint.runtime.profiling import drawing, page
from graphlint.runtime.profiling.analyse import Clock, analyse, with_measurement
from graphlint.runtime.profiling.drawing import Clock as DrawnClock
from graphlint.runtime.profiling.readings import Reading
from graphlint.runtime.profiling.report import Report
from graphlint.runtime.profiling.steps import cut, typical


def report() -> Report:
    recorder = Recorder()
    for number in range(3):
        begin = recorder.host
        for _ in range(60):
            recorder.launch(3, host=10, name="void <b>kernel</b>&")
        recorder.module("model.</script><script>alert(1)</script>", "Net", begin)
        recorder.step(number, begin)
    return with_measurement(
        analyse(recorder.timeline(), clock=Clock(400.0, 400.0)), Reading((400.0,)), Reading((230.0,))
    )


def test_json_is_whole_and_worked_out() -> None:
    loaded = json.loads(report().to_json())
    assert loaded["whole"]["gain"] == pytest.approx(loaded["whole"]["wall"] / loaded["whole"]["projected"])
    assert loaded["whole"]["measured_gain"] == pytest.approx(400 / 230)
    assert loaded["advice"]["verdict"] == "do it first"
    assert {"path", "choice", "share", "step_gain", "projected_gain"} <= loaded["modules"][0].keys()
    assert "drawing" not in loaded


def test_text_shows_the_device_and_the_graph_to_scale() -> None:
    text = analyse(steady(kernels=60, device=3, host=12)).to_text()
    now = next(line for line in text.splitlines() if "device, now" in line)
    graph = next(line for line in text.splitlines() if "as a graph" in line)
    assert len(now.rstrip()) == len(graph.rstrip())
    assert graph.count("█") == pytest.approx(72 * (3.4 / 12), abs=2)


def test_text_lines_fit_a_terminal() -> None:
    assert max(map(len, analyse(steady(60, 3, 12)).to_text().splitlines())) <= 100


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.found += [v or "" for k, v in attrs if k in ("src", "href", "action", "data")]


def test_the_page_needs_no_other_file_and_no_network() -> None:
    page = report().to_html()
    parser = _Links()
    parser.feed(page)
    assert parser.found == [] and "link" not in parser.tags
    assert not re.search(r"https?:|url\(|@import|fetch\(|XMLHttpRequest", page)
    assert "{{" not in page


def test_names_from_a_recording_can_not_break_out_of_the_page() -> None:
    page = report().to_html()
    parser = _Links()
    parser.feed(page)
    assert parser.tags.count("script") == 2  # the data and the code; none that the recording brought
    assert "<b>kernel" not in page


def test_names_with_braces_stay_what_they_are() -> None:
    page = replace(report(), source="{{data}} {{headline}} \\1").to_html()
    assert page.count("{{data}} {{headline}} \\1") == 2  # title and heading
    assert page.count('"length":') == 1


def test_the_page_may_load_nothing() -> None:
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', report().to_html())
    assert policy and policy[1].startswith("default-src 'none'")
    assert "http" not in policy[1] and "*" not in policy[1]


def test_the_timeline_can_be_used_without_a_mouse() -> None:
    page = report().to_html()
    assert re.search(r'<canvas tabindex="0" role="img"', page) and "onkeydown" in page
    assert re.search(r"<button data-from=[^>]*title='launch: show it'>", page)


def test_a_step_too_long_to_draw_says_where_the_timeline_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "MOST_DRAWN", 10)
    monkeypatch.setattr(page, "MOST_DRAWN", 10)
    assert "the first 10 operations" in report().to_html()
    monkeypatch.undo()
    assert "operations of the step." not in report().to_html()


def test_the_spread_of_a_measured_gain_stands_on_the_page_and_in_the_text() -> None:
    measured = replace(
        report().whole, wall_range=(380.0, 440.0), graphed_range=(225.0, 235.0), measured_range=(1.6, 1.9)
    )
    told = replace(report(), whole=measured)
    low, high = 380 / measured.projected, 440 / measured.projected
    assert f"projected {low:.2f}x to {high:.2f}x" in told.to_html()
    text = told.to_text()
    assert f"({low:.2f} to {high:.2f})" in text and "(1.60 to 1.90)" in text and "380 µs to 440 µs" in text
    assert json.loads(told.to_json())["whole"]["gain_range"] == pytest.approx([low, high])


def test_the_data_of_the_page_is_the_step() -> None:
    page = report().to_html()
    text = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert text
    data = json.loads(text[1])
    assert len(data["ops"]) == 60 and len(data["calls"]) == 60
    assert data["length"] == pytest.approx(400, rel=0.02)
    assert sum(gap[1] for gap in data["gaps"]) == pytest.approx(400 - 60 * 3, rel=0.05)


def test_a_report_without_a_drawing_has_a_page_too() -> None:
    assert ">null<" in replace(report(), drawing=None).to_html()


def test_the_drawing_shrinks_idle_time_and_keeps_device_time() -> None:
    step = typical(cut(steady(kernels=10, device=5, host=50))[0])
    clock = DrawnClock(step, wall=200.0)
    assert clock(clock.end) == pytest.approx(200 + clock.behind)
    assert clock.span(step.ops[0].start, step.ops[0].end)[1] == pytest.approx(5)
    times = [clock(t) for t in (step.start, step.ops[0].start, step.ops[0].end, step.ops[5].start, step.end)]
    assert times == sorted(times)


def test_earlier_work_of_a_device_that_lags_is_no_gap() -> None:
    drawn = analyse(steady(kernels=10, device=100, host=10)).drawing
    assert drawn is not None and drawn.behind > 1000  # the device is two steps behind
    assert sum(gap[1] for gap in drawn.gaps) < 20 and drawn.shrink > 0.9


def test_a_drawing_is_never_stretched() -> None:
    step = typical(cut(steady(kernels=10, device=5, host=50))[0])
    assert DrawnClock(step, wall=1e6).shrink == 1.0
