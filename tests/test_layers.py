"""The drawing of the house holds: imports go one way, and the two halves meet in the shared rooms only: what is found,
the rulebook, source text, and the writers of reports.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import graphlint

try:
    import tomllib
except ModuleNotFoundError:
    import tomli as tomllib  # type: ignore[no-redef]

PACKAGE = Path(graphlint.__file__).parent
TABLE = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["graphlint-layers"]
STATIC: list[str] = TABLE["static"]
RUNTIME: list[str] = TABLE["runtime"]
SHARED: list[str] = TABLE["shared"]
FREE = {"__init__", "__main__"}  # the front door may name every room


def files() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if "rules" not in path.relative_to(PACKAGE).parts[:1])


def room_of(module: str) -> str:
    """`graphlint.report.text` -> `report`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports(text: str, path: Path) -> Iterator[tuple[str, int]]:
    """`(module, row)` of every import of graphlint in a file, also those inside functions; not those for type checkers
    only.
    """
    package = ("graphlint", *path.relative_to(PACKAGE).parts[:-1])
    for node in walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names if alias.name.split(".")[0] == "graphlint")
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module or "")))
            if module == "graphlint":
                yield from ((f"graphlint.{alias.name}", node.lineno) for alias in node.names)
            elif module.startswith("graphlint."):
                yield module, node.lineno


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """Every node but those below `if TYPE_CHECKING:`."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING")):
            yield from walk(child)


def wrong(room: str, other: str) -> bool:
    """Whether a room may not import from another one."""
    if other == room or other in (*SHARED, "__init__", "__version__") or room in FREE:
        return False
    if room in STATIC and other in STATIC:
        return STATIC.index(other) < STATIC.index(room)
    return not (room in RUNTIME and other in RUNTIME)


def test_every_room_stands_in_the_drawing() -> None:
    rooms = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in files()}
    assert rooms - FREE == {*STATIC, *RUNTIME, *SHARED}


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    found = [
        f"{path.name}:{row} imports {module}"
        for module, row in imports(path.read_text(), path)
        if wrong(room, room_of(module))
    ]
    assert not found


def test_the_test_can_fail() -> None:
    path = PACKAGE / "flow" / "text.py"
    seen = [
        room_of(module)
        for module, _ in imports(
            "from graphlint import pipeline\nfrom ..cli import main\nimport graphlint.flow.x", path
        )
    ]
    assert seen == ["pipeline", "cli", "flow"]
    assert wrong("report", "pipeline") and wrong("report", "runtime") and wrong("flow", "runtime") and wrong("runtime", "flow")
    assert not wrong("pipeline", "report") and not wrong("flow", "rulebook") and not wrong("runtime", "rulebook")
