"""Does the profile's projection hold? Profiles each workload on a GPU, captures it, and compares.

    python benchmarks/profile_gain.py --output benchmarks/results/profile_gain.json [--traces FOLDER] [NAME...]
    python benchmarks/profile_gain.py --output benchmarks/results/profile_gain.json --traces FOLDER --rejudge

Times are microseconds. The eager step is read three times: `before` anything is captured; in turns with the graph
(`eager`, `measured_graph`, `measured`); and `later`, in turns with a graph captured anew. `projected` is how many
times faster one graph is said to be, over `eager`. The projection is off by

- `error`: against the gain measured in the same turns;
- `error_later`: the same projection against the later reading, which it knows nothing of;
- `error_before`: as it was made before the measurement, over the time of `before`, against the gain measured.

The first form needs a CUDA device and takes three to four minutes. The second one judges the kept traces again, where
the analysis has changed and the measurement has not; it needs no GPU.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import profile_workloads

from graphlint.runtime.profiling import profile, read
from graphlint.runtime.profiling.analyse import Clock, analyse
from graphlint.runtime.profiling.measure import Measured, measure_in_step, measure_modules, measure_step
from graphlint.runtime.profiling.readings import Reading, ratio
from graphlint.runtime.profiling.record import Step
from graphlint.runtime.profiling.report import Choice, Module
from graphlint.runtime.profiling.world import World

TELLING = 1.05  # projected gain of the step below which a module is not worth a measurement
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
    command = "python benchmarks/profile_gain.py --output benchmarks/results/profile_gain.json"
    where = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "command": command}
    rows = {}
    for name in options.names or every:
        began = time.perf_counter()
        rows[name] = measure(name, options.traces)
        print(line(name, rows[name]), f"[{time.perf_counter() - began:.0f} s]", flush=True)
        options.output.write_text(json.dumps({"where": where, "workloads": rows}, indent=2) + "\n")  # a run may be cut
        gc.collect()
        torch.cuda.empty_cache()


def line(name: str, row: dict[str, Any]) -> str:
    """One workload in one line."""
    said = f"{name:24} {row['launch_bound_share']:>4.0%} launch-bound, eager {row['eager'] / 1e3:8.2f} ms"
    if "measured" not in row:
        return f"{said}  projected {row['projected']:.2f}x, not captured: {row.get('reason') or 'reads its loss'}"
    low, high = row["measured_range"]
    said += f"  projected {row['projected']:5.2f}x  measured {row['measured']:5.2f}x ({low:.2f} to {high:.2f})"
    said += f"  off {row['error']:+.1%}, later {row['error_later']:+.1%}, before {row['error_before']:+.1%}"
    for path, m in row["modules"].items():
        gain = "not measured" if m["measured_step_gain"] is None else f"measured {m['measured_step_gain']:.2f}x"
        said += f"\n  {path:22} in the step: projected {m['step_gain']:.2f}x, {gain} {m['reason']}".rstrip()
    return said


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
    row = judged(report)
    if name in NOT_CAPTURED:
        return row
    step, _ = Step(fn, batches=batches).held()
    world = World(fn)
    measured = measure_step(step, world)
    row["reason"] = measured.reason
    row["modules"] = _modules(report, step, world)
    later = measure_step(step, world)
    if measured.eager is None or measured.graphed is None or later.eager is None or later.graphed is None:
        return row
    row["before"] = {"eager": row["eager"], "range": report.whole.wall_range}
    row["later"] = _read(later.eager, later.graphed)
    row |= _read(measured.eager, measured.graphed)
    return row | errors(row)


def _read(eager: Reading, graphed: Reading) -> dict[str, Any]:
    return {
        "eager": eager.median,
        "eager_range": eager.range,
        "measured_graph": graphed.median,
        "graph_range": graphed.range,
        "measured": eager.median / graphed.median,
        "measured_range": ratio(eager, graphed),
    }


def errors(row: dict[str, Any]) -> dict[str, float]:
    """How far the projected gain is from each measured one."""
    projected = row["eager"] / row["projected_graph"]
    return {
        "projected": projected,
        "error": projected / row["measured"] - 1,
        "error_later": projected / row["later"]["measured"] - 1,
        "error_before": row["before"]["eager"] / row["projected_graph"] / row["measured"] - 1,
    }


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
            row |= errors(row)
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


def _modules(report: Any, step: Step, world: World) -> dict[str, dict[str, Any]]:
    """Up to three modules with the rest of the step around them, and the first of them alone, forward and backward."""
    chosen = [m for m in report.modules if m.choice in (Choice.CAPTURE, Choice.LEAVE) and m.nodes >= 8][:2]
    chosen += [m for m in report.modules if m.path == "model.blocks.1"]
    alone = measure_modules(step, world, [m.path for m in chosen[:1]])
    within = measure_in_step(step, world, [m.path for m in chosen if m.step_gain > TELLING])
    none = Measured()
    return {m.path: _module(m, alone.get(m.path, none), within.get(m.path, none)) for m in chosen}


def _module(m: Module, alone: Measured, within: Measured) -> dict[str, Any]:
    row: dict[str, Any] = {
        "choice": m.choice.value,
        "step_gain": m.step_gain,
        "measured_step_gain": within.gain,
        "projected_alone": m.alone,
        "measured_alone": alone.gain,
        "projected_graph": m.projected,
        "reason": alone.reason or within.reason,
    }
    if alone.eager is not None and alone.graphed is not None:
        row |= {"eager": alone.eager.median, "graphed": alone.graphed.median}
    if within.eager is not None and within.graphed is not None:
        row |= {"step_eager": within.eager.median, "step_graphed": within.graphed.median}
        row["step_range"] = ratio(within.eager, within.graphed)
    return row


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
