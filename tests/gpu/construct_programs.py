"""The constructs that are known to break a capture, as one module of functions in a real file, so that lines can be
shown. `c_NAME()` gives `(step, ...)`.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

ROWS = [
    json.loads(line) for line in (Path(__file__).parent / "constructs.jsonl").read_text(encoding="utf-8").splitlines()
]
PRELUDE = """
import threading
import torch
from torch import nn
import torch.nn.functional as F
D = "cuda"

def R(*shape): return torch.randn(*shape, device=D)
def case(f): return f
def _model(): return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)).to(D)

c = torch.zeros(8, 8)
i = torch.tensor([0, 1])
p = torch.zeros(8, 8).pin_memory()
"""


def special(name: str) -> str:
    """The text of a construct that its name alone describes."""
    if found := re.match(r"opt_(\w+?)_cap(True|False|None)_(\w*)$", name):
        kind, capturable, how = found.groups()
        extra = "" if capturable == "None" else f", capturable={capturable}"
        extra += f", {how}=True" if how else ""
        body = f"o = torch.optim.{kind}(m.parameters(), lr=1e-3{extra})"
    elif name == "clip_error_if_nonfinite":
        body = "o = None"
    else:
        kind = "Adam(m.parameters(), capturable=True)" if "adam" in name else "SGD(m.parameters(), lr=0.1)"
        body = f"o = torch.optim.{kind}\n    s = torch.amp.GradScaler('cuda')"
    step = "o.step()" if "opt" in name else "nn.utils.clip_grad_norm_(m.parameters(), 1.0, error_if_nonfinite=True)"
    if "scaler" in name:
        step = "s.step(o); s.update()"
    loss = "s.scale(m(x).sum()).backward()" if "scaler" in name else "m(x).sum().backward()"
    return f"""
def c_{name}():
    m = _model()
    x = R(16, 32)
    {body}
    def f():
        for q in m.parameters(): q.grad = None
        {loss}
        {step}  # fault
    return f, None, None
"""


def load(folder: Path) -> Any:
    """Writes `capture_constructs.py` into a folder and imports it."""
    parts = [PRELUDE]
    for row in ROWS:
        name, code = row["name"], row["code"]
        if not code:
            parts.append(special(name))
        elif code.startswith("@case"):
            parts.append(code.replace(f"def {name}(", f"def c_{name}("))
        else:
            parts.append(
                f"def c_{name}():\n    x = R(8, 8)\n    def f():\n        return {code}\n    return f, None, None\n"
            )
    path = folder / "capture_constructs.py"
    path.write_text("\n".join(parts), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("capture_constructs", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["capture_constructs"] = module
    spec.loader.exec_module(module)
    return module
