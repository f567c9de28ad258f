"""Linting loads no torch, the runtime half loads no libcst, and `import graphlint` loads neither.

Each claim is tried in a fresh process; the last tests prove that the claims could fail.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from kit import project

REFUSE = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names!r}:
            raise ImportError(f"{{name}} was imported")

sys.meta_path.insert(0, Refuse())
"""


def python(program: str, cwd: Path, refused: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Runs a program in a process where importing one of `refused` is an error."""
    return subprocess.run(
        [sys.executable, "-c", REFUSE.format(names=refused) + program],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
    )


PROGRAM = """
import torch

def helper(x):
    return x.item()

graph = torch.cuda.CUDAGraph()
x = torch.zeros(8, device="cuda")
with torch.cuda.graph(graph):
    helper(x)
"""

LINT = """
import graphlint
result = graphlint.lint(".")
assert result.files == 2, result
print("linted")
"""


def test_import_is_cheap(tmp_path: Path) -> None:
    done = python(
        "import graphlint; print(len([m for m in sys.modules if m.startswith('graphlint')]))",
        tmp_path,
        ("torch", "libcst", "click", "msgspec"),
    )
    assert (done.stdout, done.stderr) == ("1\n", "")


def test_linting_needs_no_torch(tmp_path: Path) -> None:
    project(tmp_path, {"a.py": PROGRAM, "b.py": "type X = int\nx: X = f'{f'{1}'}'\n"})
    done = python(LINT, tmp_path, ("torch", "numpy"))
    assert (done.stdout, done.stderr) == ("linted\n", "")


@pytest.mark.parametrize(
    "args", [["check", "a.py"], ["regions", "a.py"], ["rules"], ["explain", "CG101"], ["--help"], ["--version"]]
)
def test_no_static_command_needs_torch(tmp_path: Path, args: list[str]) -> None:
    project(tmp_path, {"a.py": PROGRAM})
    done = python(f"from graphlint.cli import main\nmain({args!r})", tmp_path, ("torch", "numpy"))
    assert done.returncode in (0, 1) and done.stderr == ""


def test_a_warm_run_needs_no_libcst_and_no_ast(tmp_path: Path) -> None:
    project(tmp_path, {"a.py": PROGRAM, "b.py": "type X = int\n"})
    assert python(LINT, tmp_path).returncode == 0
    done = python(LINT, tmp_path, ("torch", "libcst"))
    assert (done.stdout, done.stderr) == ("linted\n", "")


def test_the_runtime_half_needs_no_libcst(tmp_path: Path) -> None:
    program = """
import importlib, pkgutil, graphlint.runtime
for module in pkgutil.walk_packages(graphlint.runtime.__path__, "graphlint.runtime."):
    importlib.import_module(module.name)
print("imported")
"""
    done = python(program, tmp_path, ("libcst",))
    assert (done.stdout, done.stderr) == ("imported\n", "")


def test_the_claims_can_fail(tmp_path: Path) -> None:
    done = python("import graphlint, torch", tmp_path, ("torch",))
    assert done.returncode == 1 and "torch was imported" in done.stderr
    done = python("import libcst", tmp_path, ("libcst",))
    assert done.returncode == 1 and "libcst was imported" in done.stderr


def test_nothing_static_names_torch_in_an_import() -> None:
    """The text says so too: no import of torch outside the runtime half, wherever it is hidden."""
    import ast

    import graphlint

    package = Path(graphlint.__file__).parent
    for path in package.rglob("*.py"):
        if path.relative_to(package).parts[0] in ("runtime", "rules", "pytest_plugin.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.split(".")[0] == "torch"], f"{path}:{node.lineno}"
