"""Nothing that a disk can hold crashes the command, hangs it, or keeps the other files from being linted.

Each case runs the real command in a process of its own. `good.py` beside the bad input carries one unused suppression,
so that its note proves that the rest was
linted.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kit import command, project

GOOD = "x = 1  # graphlint: ignore[no-such-rule]\n"  # reported whatever else could not be seen


def lint(tmp_path: Path, *args: str | Path, code: int = 2, **environment: str) -> subprocess.CompletedProcess[str]:
    """Lints the folder (or `args`); checks the exit code, that nothing was a traceback, and that `good.py` was linted
    all the same.
    """
    (tmp_path / "good.py").write_text(GOOD)
    done = command(*(args or (".",)), "--output-format", "concise", cwd=tmp_path, **environment)
    assert done.returncode == code, done
    assert "Traceback" not in done.stderr and "internal error" not in done.stderr, done.stderr
    assert "good.py:1:8: CG900" in done.stdout or "good.py" not in (args or ("good.py",))
    return done


def only_error(done: subprocess.CompletedProcess[str]) -> str:
    """The one line on stderr."""
    (line,) = done.stderr.splitlines()
    return line


def test_what_is_no_file(tmp_path: Path) -> None:
    assert (
        only_error(lint(tmp_path, "good.py", "gone.py"))
        == "gone.py: error: does not exist; name a Python file or a folder"
    )
    os.mkfifo(tmp_path / "pipe.py")
    assert (
        only_error(lint(tmp_path, "good.py", "pipe.py"))
        == "pipe.py: error: is not a regular file; name a Python file or a folder"
    )
    assert "/dev/null: error: is not a regular file" in only_error(lint(tmp_path, "good.py", "/dev/null"))
    lint(tmp_path, code=0)  # a pipe in a folder is passed over, not waited for


def test_empty_things(tmp_path: Path) -> None:
    project(tmp_path, {"empty.py": b"", "blank.py": b"\n\n", "bom.py": b"\xef\xbb\xbf", "comment.py": b"# nothing"})
    assert lint(tmp_path, code=0).stderr == ""


def test_a_folder_without_python(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    done = lint(tmp_path, "docs", code=0)
    assert done.stderr == "warning: no Python files under the given paths\n" and done.stdout == ""


def test_an_empty_name(tmp_path: Path) -> None:
    lint(tmp_path, "good.py", "", code=0)  # an empty name is the current folder, as for the shell's own tools


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"a = 1\nb = '\xff\xfe'\n", "bad.py:2: error: can't be decoded as utf-8: byte 0xff (invalid start byte)"),
        (b"# coding: no-such\nx = 1\n", "bad.py:1: error: can't be decoded: unknown encoding: no-such"),
        (b"a = 1\n\nb\0c\n", "bad.py:3: error: holds a null byte, which Python refuses"),
        (b"def f(:\n", "bad.py:1: error: syntax error: "),
        (b"if x:\npass\n", "bad.py:2: error: syntax error: expected an indented block"),
        (b"print 'old'\n", "bad.py:1: error: syntax error: Missing parentheses"),
        (b"x = (\n" * 3, "bad.py:"),
        (b"x = " + b"(" * 3000 + b")" * 3000, "bad.py:1: error: syntax error: too many nested parentheses"),
        (b"x = " + b"-" * 100_000 + b"1", "bad.py:1: error: "),
        (b"\x7fELF\x02\x01\x01" + bytes(range(256)) * 10, "bad.py:"),
    ],
    ids=["bytes", "coding", "null", "syntax", "indent", "python2", "open", "deep", "minus", "binary"],
)
def test_bad_text_is_one_line_with_its_place(tmp_path: Path, data: bytes, line: str) -> None:
    project(tmp_path, {"bad.py": data})
    assert only_error(lint(tmp_path)).startswith(line)
    assert only_error(lint(tmp_path)).startswith(line)  # and again, from the cache
    assert only_error(lint(tmp_path, "good.py", "bad.py", "--no-cache")).startswith(line)


@pytest.mark.parametrize(
    "text",
    [
        "type X[T] = list[T]\n",
        "def f[T: int = str](x: T) -> T: ...\n",
        "class A[*Ts, **P]: ...\n",
        "x = f'{f'{'nested'}'}'\n",
        "try: ...\nexcept* ValueError: ...\n",
    ],
)
def test_syntax_of_newer_pythons_is_read(tmp_path: Path, text: str) -> None:
    project(tmp_path, {"new.py": text})
    assert lint(tmp_path, code=0).stderr == ""


def test_newer_syntax_does_not_hide_a_fault(tmp_path: Path) -> None:
    text = REGION.format(body="helper[int](x)") + "\ntype X[T] = list[T]\n"
    helper = "\ndef helper[T](x: T, *, key='k') -> X[T]:\n    print(f'{d['k']}')\n    return x.item()\n"
    project(tmp_path, {"new.py": helper + text.replace("helper[int]", "helper")})
    assert "new.py:4:12: CG101" in lint(tmp_path, code=1).stdout


def test_in_a_large_project_files_named_one_by_one_are_parsed(tmp_path: Path) -> None:
    project(tmp_path, {"bad.py": "def f(:\n", "large.py": "# " + "x" * (1 << 20) + "\n"})
    assert lint(tmp_path, code=0).stderr == ""  # no region leads there
    files = ("bad.py", "good.py", "large.py")
    assert only_error(lint(tmp_path, *files)).startswith("bad.py:1: error: syntax error")  # not the answer cached above


def test_deep_nesting_that_python_accepts(tmp_path: Path) -> None:
    blocks = "".join("    " * depth + "if x:\n" for depth in range(95)) + "    " * 95 + "pass\n"
    chain = "x" + ".a" * 900 + "\n"
    calls = "y = " + "f(" * 90 + ")" * 90 + "\n"
    total = "z = " + " + ".join(["1"] * 900) + "\n"
    project(tmp_path, {"blocks.py": blocks, "chain.py": chain, "calls.py": calls, "sum.py": total})
    assert lint(tmp_path, code=0).stderr == ""


REGION = """\
import torch

g = torch.cuda.CUDAGraph()
x = torch.zeros(8, device="cuda")
with torch.cuda.graph(g):
    y = {body}
"""


@pytest.mark.parametrize(
    "body",
    [
        "x" + ".relu()" * 1000,
        "(" * 1000 + "x" + ")" * 1000,
        "x" + " + x" * 3000,
        "f(" * 1000 + "x" + ")" * 1000,
        "lambda: " * 1000 + "x",
        "[" * 1000 + "]" * 1000,
    ],
    ids=["chain", "parentheses", "sum", "calls", "lambdas", "lists"],
)
def test_thousand_deep_nesting_in_a_region(tmp_path: Path, body: str) -> None:
    project(tmp_path, {"deep.py": REGION.format(body=body)})
    (tmp_path / "good.py").write_text(GOOD)
    done = command(".", "--output-format", "concise", cwd=tmp_path)
    assert done.returncode in (0, 1, 2) and "Traceback" not in done.stderr and "internal error" not in done.stderr
    assert "good.py:1:8: CG900" in done.stdout
    assert done.returncode != 2 or only_error(done).startswith("deep.py")


def test_a_file_of_100_000_lines(tmp_path: Path) -> None:
    many = "".join(f"def f{number}(x):\n    return x + {number}\n\n" for number in range(33_334))
    project(tmp_path, {"long.py": REGION.format(body="f7(x)") + many})
    begun = time.monotonic()
    assert lint(tmp_path, code=0).stderr == ""
    assert time.monotonic() - begun < 60


def test_import_cycles(tmp_path: Path) -> None:
    project(
        tmp_path,
        {
            "a.py": "from b import *\nfrom b import f as g\nimport a\n" + REGION.format(body="g(x)"),
            "b.py": "from c import *\nfrom c import f\n",
            "c.py": "from a import *\nfrom a import g as f\nclass A(B): pass\nclass B(A): pass\nclass C(C): pass\n",
            "p/__init__.py": "from .q import *\nfrom . import q, p\n",
            "p/q.py": "from . import *\nfrom .. import a\nfrom ..... import x\n",
        },
    )
    assert lint(tmp_path, code=0).stderr == ""


def test_recursion_in_a_region(tmp_path: Path) -> None:
    text = "def f(x, n=0):\n    return g(x, n + 1)\n\ndef g(x, n):\n    return f([x], n) if n < 10**9 else h(f, g, x)\n\ndef h(a, b, x):\n    return a(b(h(b, a, x), 1))\n\n"
    project(tmp_path, {"loop.py": text + REGION.format(body="f(x)")})
    assert lint(tmp_path, code=0).stderr == ""


def test_symlink_loops(tmp_path: Path) -> None:
    project(tmp_path, {"a/b/c.py": ""})
    (tmp_path / "a/b/up").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "self.py").symlink_to("self.py")
    (tmp_path / "self").symlink_to("self")
    (tmp_path / "gone.py").symlink_to("nowhere.py")
    assert lint(tmp_path, code=0).stderr == ""
    assert only_error(lint(tmp_path, "good.py", "self.py")).startswith("self.py: error: does not exist")


LOCKED = """
import os, sys
from graphlint.cli import main
real = os.scandir
def scandir(path="."):
    if str(path).endswith("locked"):
        raise PermissionError(13, "Permission denied")
    return real(path)
os.scandir = scandir
main(sys.argv[1:])
"""


@pytest.mark.parametrize("how", ["mode", "patched"])
def test_unreadable_folders(tmp_path: Path, how: str) -> None:
    """By its mode where the system obeys it; patched, because for root no folder is locked."""
    project(tmp_path, {"locked/a.py": "", "good.py": GOOD})
    if how == "mode" and os.geteuid() != 0:
        os.chmod(tmp_path / "locked", 0)
        done = command(".", "--output-format", "concise", cwd=tmp_path)
        os.chmod(tmp_path / "locked", 0o755)
    else:
        args = [sys.executable, "-c", LOCKED, ".", "--output-format", "concise"]
        done = subprocess.run(args, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr == "locked: error: can't be listed: permission denied\n"
    assert "good.py:1:8: CG900" in done.stdout


@pytest.mark.parametrize("damage", ["cut", "empty", "noise", "folders", "readonly"])
def test_a_damaged_cache(tmp_path: Path, damage: str) -> None:
    project(tmp_path, {"a.py": REGION.format(body="x + 1")})
    first = lint(tmp_path, code=0)
    files = list((tmp_path / ".graphlint_cache").rglob("*.bin"))
    assert files
    for path in files:
        data = path.read_bytes()
        path.unlink()
        if damage == "folders":
            path.mkdir()
        else:
            path.write_bytes(
                {"cut": data[: len(data) // 2], "empty": b"", "noise": os.urandom(len(data)), "readonly": data}[damage]
            )
            os.chmod(path, 0o400 if damage == "readonly" else 0o644)
    again = lint(tmp_path, code=0)
    assert (again.stdout, again.stderr) == (first.stdout, "")


def test_two_runs_at_once_on_one_cache(tmp_path: Path) -> None:
    project(tmp_path, {f"m{number}.py": REGION.format(body=f"x + {number}") for number in range(30)})
    (tmp_path / "good.py").write_text(GOOD)
    args = [sys.executable, "-m", "graphlint", ".", "--output-format", "concise"]
    runs = [
        subprocess.Popen(args, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    results = [(run.communicate(timeout=120), run.returncode) for run in runs]
    assert len({out for (out, _), _ in results}) == 1 and {err for (_, err), _ in results} == {""}
    assert {code for _, code in results} <= {0, 1}
    assert not list(tmp_path.rglob("tmp-*"))


FULL = f"""
import os, sys
from graphlint.cli import main
def replace(*_):
    raise OSError({errno.ENOSPC}, os.strerror({errno.ENOSPC}))
os.replace = replace
main(sys.argv[1:])
"""


def test_a_full_disk_while_caching(tmp_path: Path) -> None:
    project(tmp_path, {"good.py": GOOD})
    args = [sys.executable, "-c", FULL, ".", "--output-format", "concise"]
    done = subprocess.run(args, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == "" and "good.py:1:8: CG900" in done.stdout


def test_a_really_full_disk(tmp_path: Path) -> None:
    """`/dev/full` refuses every byte: the report that can't be written is an error, in one line."""
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here; test_a_full_disk_while_caching stands for it")
    (tmp_path / "good.py").write_text(GOOD)
    done = command("good.py", "-o", "/dev/full", cwd=tmp_path)
    assert (
        done.returncode == 2
        and only_error(done) == "/dev/full: error: the report can't be written: no space left on device"
    )
    with open("/dev/full", "w") as full:
        line = subprocess.run(
            [sys.executable, "-m", "graphlint", "good.py"], cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert line.returncode == 2 and "Traceback" not in line.stderr and "no space left" in line.stderr.lower()


def test_the_current_folder_is_gone(tmp_path: Path) -> None:
    script = f"import os, tempfile\nd = tempfile.mkdtemp()\nos.chdir(d)\nos.rmdir(d)\nfrom graphlint.cli import main\nmain([{str(tmp_path / 'good.py')!r}])"
    (tmp_path / "good.py").write_text(GOOD)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "Traceback" not in done.stderr and len(done.stderr.splitlines()) == 1


def test_nothing_is_written_but_the_cache(tmp_path: Path) -> None:
    project(tmp_path, {"a.py": REGION.format(body="x + 1"), "bad.py": b"\xff"})
    lint(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"a.py", "bad.py", "good.py", ".graphlint_cache"}
    assert (tmp_path / "bad.py").read_bytes() == b"\xff"
