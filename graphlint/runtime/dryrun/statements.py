"""What the statements on executed lines do: which names they bind, what they collect, which loops go around them."""

from __future__ import annotations

import ast
import linecache

import msgspec

from graphlint.runtime.dryrun import sites
from graphlint.runtime.dryrun.records import Site


def line_site(place: tuple[str, int]) -> Site:
    """A site for a bare line."""
    text = linecache.getline(*place)
    return Site(
        place[0],
        place[1],
        column=len(text) - len(text.lstrip()) + 1,
        end_row=place[1],
        end_column=len(text.rstrip()) + 1,
    )


def looped(site: Site) -> Site:
    """The innermost line on the way to a site that stands in a loop; the site itself where none does."""
    if _in_loop(site.place, site.function):
        return site
    for index in reversed(range(len(site.trace))):
        filename, row, function = site.trace[index]
        if _in_loop((filename, row), function):
            return msgspec.structs.replace(line_site((filename, row)), function=function, trace=site.trace[:index])
    return site


def _in_loop(place: tuple[str, int], function: str) -> bool:
    """Whether a loop of that function goes around the line."""
    tree = sites.parsed(place[0])
    scopes = [
        node
        for node in (ast.walk(tree) if tree else ())
        if isinstance(node, (ast.FunctionDef, ast.Module))
        and (getattr(node, "name", "<module>") == function or function.endswith("comp>"))
        and getattr(node, "lineno", 0) <= place[1] <= (getattr(node, "end_lineno", None) or place[1])
    ]
    return any(
        (isinstance(node, (ast.For, ast.While)) and node.lineno < place[1] <= (node.end_lineno or 0))
        or (isinstance(node, ast.ListComp) and node.lineno <= place[1] <= (node.end_lineno or 0))
        for scope in scopes
        for node in ast.walk(scope)
    )


def assigns(place: tuple[str, int], name: str) -> bool:
    """Whether the statement on a line gives a value to a name, an attribute or a key of that name."""
    tree = sites.parsed(place[0])
    return any(
        changes(node, name)
        for node in (ast.walk(tree) if tree else ())
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)) and node.lineno == place[1]
    )


def tests_for_tensor(place: tuple[str, int]) -> tuple[int, int] | None:
    """The rows of what a line guards that asks whether a value is a tensor before it is copied; None for others."""
    tree = sites.parsed(place[0])
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, ast.If) and node.lineno == place[1]:
            asked, body = ast.unparse(node.test), "\n".join(ast.unparse(x) for x in node.body)
            if ("isinstance" in asked or "tensor" in asked.lower()) and "copy" in body:
                return node.body[0].lineno, node.body[-1].end_lineno or node.body[-1].lineno
    return None


def last_assigned(lines: list[tuple[str, int]], name: str) -> tuple[str, int] | None:
    """The last executed line that gave a value to a name, attribute or key, or that appended to a list (`[3]`)."""
    for place in dict.fromkeys(reversed(lines)):
        tree = sites.parsed(place[0])
        for node in ast.walk(tree) if tree else ():
            if getattr(node, "lineno", -1) != place[1]:
                continue
            if name.startswith("[") and _collects(node):
                return place
            if not name.startswith("[") and isinstance(node, (ast.Assign, ast.AnnAssign)) and changes(node, name):
                return place
    return None


def copied_name(lines: list[tuple[str, int]], name: str, others: set[str]) -> tuple[str, int] | None:
    """The last executed line that bound a name to what one of the other names was bound to (`previous = current`)."""
    for place in dict.fromkeys(reversed(lines)):
        tree = sites.parsed(place[0])
        for node in ast.walk(tree) if tree else ():
            if isinstance(node, ast.Assign) and node.lineno == place[1] and changes(node, name):
                value = node.value
                return place if isinstance(value, ast.Name) and value.id in others else None
    return None


def _collects(node: ast.AST) -> bool:
    """Whether an expression puts something into a container: `append`, `d[k] = ...`, a comprehension."""
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Subscript) for target in node.targets)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in ("append", "extend", "insert", "setdefault", "update")
    return isinstance(node, (ast.ListComp, ast.DictComp))


def cached_function(site: Site) -> bool:
    """Whether the line stands in a function whose results are cached by a decorator."""
    tree = sites.parsed(site.filename)
    for node in ast.walk(tree) if tree else ():
        if (
            isinstance(node, ast.FunctionDef)
            and node.name == site.function
            and node.lineno <= site.row <= (node.end_lineno or 0)
        ):
            return any("cache" in ast.unparse(decorator) for decorator in node.decorator_list)
    return False


_CHANGING = (
    "append",
    "extend",
    "add",
    "update",
    "pop",
    "popleft",
    "appendleft",
    "insert",
    "remove",
    "clear",
    "setdefault",
    "discard",
)


def changes(node: ast.AST, name: str) -> bool:
    """Whether a statement or a call gives a name another value, or changes the container behind it."""
    if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        flat = [
            x for target in targets for x in (target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target])
        ]
        return any(_base_name(x) == name for x in flat)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGING:
        return _base_name(node.func.value) == name
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "next":
        return bool(node.args) and _base_name(node.args[0]) == name
    return False


def _base_name(node: ast.AST) -> str:
    """`self.counts[k]` -> `counts`."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
