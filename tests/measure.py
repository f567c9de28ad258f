"""Does it capture? Runs the programs of `data/measured.json` on this machine's GPU and compares with what is recorded.

usage: python tests/measure.py [NAME ...]

One process for each program, because a failed capture damages the process it happens in: this one imports torch once
and forks before CUDA is initialised. Prints a line for every program whose capture ends otherwise than recorded; exit
code 1 when there is one.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data" / "measured.json"
PRELUDE = """import math, pickle, random, threading, time, warnings
import torch
import torch.nn as nn
import torch.nn.functional as F
"""
WARMUP = """
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        f()
torch.cuda.current_stream().wait_stream(side)
"""
CAPTURE = """
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    out = f()
"""


def program(row: dict[str, Any]) -> str:
    """One row of `constructs` as the text of a whole program: setup, warm-up, capture."""
    return PRELUDE + row["program"] + "\n" + (WARMUP if row.get("warm", True) else "") + CAPTURE


def run(text: str) -> bool:
    """Whether the program ends without an exception, in a forked child; CUDA must not be initialised here before."""
    child = os.fork()
    if child == 0:
        try:
            exec(compile(text, "program", "exec"), {"__name__": "__main__"})
            import torch

            torch.cuda.synchronize()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def main(names: list[str]) -> int:
    """Runs the named programs (all without names); returns the exit code."""
    import torch

    if not torch.cuda.is_available():
        print("measure: this needs a CUDA device", file=sys.stderr)
        return 2
    data = json.loads(DATA.read_text(encoding="utf-8"))
    rows = [row for row in data["constructs"] if not names or row["name"] in names]
    different = 0
    for row in rows:
        captured, recorded = run(program(row)), row["verdict"] != "capture-error"
        if captured != recorded:
            different += 1
            print(f"{row['name']}: {'captures' if captured else 'fails'} here, recorded: {row['verdict']}")
    print(f"{len(rows) - different} of {len(rows)} as recorded with torch {data['torch']} on {data['gpu']}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
