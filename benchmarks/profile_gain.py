"""Does the profile's projection hold? Profiles each workload on a GPU, captures it, and compares.

    python benchmarks/profile_gain.py --output benchmarks/results/profile_gain.json [--traces FOLDER] [NAME...]
    python benchmarks/profile_gain.py --output benchmarks/results/profile_gain.json --traces FOLDER --rejudge

`projected` and `measured` are how many times faster one graph is than the eager step, both over the same eager time;
`eager_again` is that time taken once more after the replay, to show how steady the machine was. The first form needs a
CUDA device and takes about a minute and a half. The second one judges the kept traces again, where the analysis has
changed and the measurement has not; it needs no GPU.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import profile_workloads

from graphlint.runtime.profiling import profile, read
from graphlint.runtime.profiling.analyse import Clock, analyse
from graphlint.runtime.profiling.measure import measure_modules, measure_step
from graphlint.runtime.profiling.record import Step, wall_time
from graphlint.runtime.profiling.report import Choice
from graphlint.runtime.profiling.world import World

# `loss.item()` can't be captured, and on torch up to 2.11 trying it harms the process
NOT_CAPTURED = ("small_gpt_reading_loss",)


def main() -> None:
    """Prints a table and writes the numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--traces", type=Path, help="keep slim traces of the workloads here")
    parser.add_argument("--rejudge", action="store_true", help="judge the kept traces again")
    options = parser.parse_args()
    if options.rejudge:
        rejudge(options.output, options.traces)
        return
    every = [n.removeprefix("make_") for n in vars(profile_workloads) if n.startswith("make_")]
    rows = {}
    for name in options.names or every:
        rows[name] = measure(name, options.traces)
        print(name, json.dumps(rows[name], default=str))
        gc.collect()
        torch.cuda.empty_cache()
    where = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "command": "benchmarks/profile_gain.py"}
    options.output.write_text(json.dumps({"where": where, "workloads": rows}, indent=2) + "\n")


def measure(name: str, traces: Path | None) -> dict[str, Any]:
    """Times in microseconds."""
    made = getattr(profile_workloads, f"make_{name}")
    fn, batches = made()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        report = profile(fn, batches=batches, measure=False, trace=trace)
        if traces is not None:
            traces.mkdir(parents=True, exist_ok=True)
            (traces / f"{name}.json.gz").write_bytes(gzip.compress(slim(trace.read_bytes()), 9, mtime=0))
    whole = report.whole
    row = judged(report)
    if name in NOT_CAPTURED:
        return row
    step = Step(fn, batches=batches)
    for i in range(5):
        step(i)
    row["modules"] = _modules(report, step, fn)
    graphed = measure_step(step, whole.wall)
    again = wall_time(step)
    measured = None if graphed.graphed is None else whole.wall / graphed.graphed
    row |= {"measured_graph": graphed.graphed, "eager_again": again, "measured": measured, "reason": graphed.reason}
    if measured:
        row["error"] = whole.gain / measured - 1
    return row


def rejudge(results: Path, traces: Path) -> None:
    """Writes the projections of today's analysis over those of the run; what was measured stays."""
    loaded = json.loads(results.read_text())
    for name, row in loaded["workloads"].items():
        trace = traces / f"{name}.json.gz"
        if not trace.exists():
            continue
        report = analyse(read(trace), clock=Clock(row["eager"], row["eager"]))
        row |= judged(report)
        if row.get("measured_graph"):
            row["measured"] = row["eager"] / row["measured_graph"]
            row["error"] = report.whole.gain / row["measured"] - 1
        for path, module in row.get("modules", {}).items():
            now = next(m for m in report.modules if m.path == path)
            module |= {"step_gain": now.step_gain, "projected_alone": now.alone, "projected_graph": now.projected}
    results.write_text(json.dumps(loaded, indent=2) + "\n")


def judged(report: Any) -> dict[str, Any]:
    """What the analysis says, as plain values."""
    whole = report.whole
    return {
        "verdict": report.advice.verdict.value,
        "headline": report.advice.headline,
        "launch_bound_share": whole.share,
        "eager": whole.wall,
        "host": whole.host,
        "device": whole.device,
        "nodes": whole.nodes,
        "projected_graph": whole.projected,
        "projected": whole.gain,
        "captured_modules": [m.path for m in report.modules if m.choice is Choice.CAPTURE],
        "left_out": [m.path for m in report.modules if m.choice is Choice.LEAVE and m.reason.startswith("keeps")],
    }


def _modules(report: Any, step: Step, fn: Any) -> dict[str, dict[str, Any]]:
    """Up to three modules alone, forward and backward."""
    chosen = [m for m in report.modules if m.choice in (Choice.CAPTURE, Choice.LEAVE) and m.nodes >= 8][:2]
    chosen += [m for m in report.modules if m.path == "model.blocks.1"]
    alone = measure_modules(step, World(fn), [m.path for m in chosen])
    return {
        m.path: {
            "choice": m.choice.value,
            "step_gain": m.step_gain,
            "projected_alone": m.alone,
            "measured_alone": alone[m.path].gain,
            "eager": alone[m.path].eager,
            "graphed": alone[m.path].graphed,
            "projected_graph": m.projected,
            "reason": alone[m.path].reason,
        }
        for m in chosen
    }


def slim(trace: bytes, steps: int = 2) -> bytes:
    """A Chrome trace with the marked steps alone, no host paths, and only what a reader of graphlint looks at."""
    loaded = json.loads(trace)
    marks = [e for e in loaded["traceEvents"] if str(e.get("name", "")).startswith("graphlint.step#")]
    marks = sorted((m for m in marks if m.get("cat") == "user_annotation"), key=lambda m: m["ts"])[:steps]
    start, end = marks[0]["ts"], marks[-1]["ts"] + marks[-1]["dur"]
    keep = ("correlation", "stream", "grid", "bytes", "Sequence number", "Fwd thread id")
    wanted = ("cpu_op", "user_annotation", "kernel", "gpu_memcpy", "gpu_memset", "cuda_runtime", "cuda_driver")
    launched = {
        e["args"].get("correlation")
        for e in loaded["traceEvents"]
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and start <= e["ts"] <= end
    }
    events = []
    for e in loaded["traceEvents"]:
        if e.get("ph") != "X" or e.get("cat") not in wanted:
            continue
        on_device = e["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")
        args = {k: v for k, v in e.get("args", {}).items() if k in keep}
        inside = args.get("correlation") in launched if on_device else start <= e["ts"] <= end
        if inside:
            events.append(
                {
                    "ph": "X",
                    "cat": e["cat"],
                    "name": e["name"][:80],
                    "pid": 0 if on_device else 1,
                    "tid": e["tid"],
                    "ts": round(e["ts"] - start, 3),
                    "dur": round(e["dur"], 3),
                    "args": args,
                }
            )
    devices = [{"name": d["name"]} for d in loaded.get("deviceProperties", [])]
    return json.dumps(
        {"deviceProperties": devices, "pytorch_version": torch.__version__, "traceEvents": events},
        separators=(",", ":"),
    ).encode()


if __name__ == "__main__":
    main()
