"""Suppressions: what they silence, what they don't, and which are worth a word themselves."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from kit import finding

from graphlint import suppress
from graphlint.config import Config
from graphlint.files import Source, Sources
from graphlint.findings import Finding, LintResult, Place, Problem, RegionInfo, RegionRef, Step


def sources(**texts: str) -> Sources:
    """`a="..."` -> the linted file `a.py`."""
    return Sources(Source(f"{name}.py", f"/p/{name}.py", name, "/p", text.encode()) for name, text in texts.items())


def silenced(text: str, *found: Finding) -> list[int]:
    """Rows of the findings that a text's own comments silence; by default one `host-sync` on each row with `item`."""
    rows = found or [finding("a.py", row) for row, line in enumerate(text.split("\n"), 1) if "item" in line]
    result = suppress.apply(LintResult(tuple(rows)), sources(a=text), Config(root="/p"))
    return [item.finding.at.row for item in result.suppressed]


@pytest.mark.parametrize(
    "comment",
    [
        "# graphlint: ignore",
        "# graphlint: ignore[host-sync]",
        "# graphlint: ignore[CG101, rng] -- the log needs it",
        "#graphlint:ignore [CG101]",
        "# noqa: CG101",
        "# NOQA:E501,CG101",
        "# noqa: E501 CG101",
        "# gpu-sync-ok: once an epoch",
        "# gpu-sync-ok",
        "# type: ignore  # graphlint: ignore[host-sync]",
        "# graphlint: ignore[rng]  # noqa: CG101",
    ],
)
def test_comments_that_silence_a_host_sync(comment: str) -> None:
    assert silenced(f"x.item()  {comment}\n") == [1]


@pytest.mark.parametrize(
    "comment",
    [
        "# noqa",
        "# noqa: E501",
        "# graphlint: ignore[rng]",
        "# graphlint: ignored",
        "# graphlint ignore",
        "# noqa: CG102",
        "# ok",
    ],
)
def test_comments_that_do_not(comment: str) -> None:
    assert silenced(f"x.item()  {comment}\n") == []


def test_text_in_a_string_is_no_comment() -> None:
    assert silenced('x.item("# graphlint: ignore")\n"""\n# graphlint: ignore\n"""\ny.item()\n') == []


def test_a_comment_behind_a_statement_holds_for_all_its_lines() -> None:
    assert silenced("f(\n    x.item(),\n    y.item(),\n)  # graphlint: ignore\nz.item()\n") == [2, 3]


def test_a_comment_inside_a_statement_holds_for_its_line() -> None:
    assert silenced("f(\n    x.item(),  # graphlint: ignore\n    y.item(),\n)\n") == [2]


def test_a_comment_alone_holds_for_the_next_line_of_code() -> None:
    assert silenced("# graphlint: ignore -- a, then b\n# more words\n\nx.item()\ny.item()\n") == [4]
    assert silenced("f(\n    # graphlint: ignore\n    x.item(),\n    y.item(),\n)\n") == [3]


def test_gpu_sync_ok_speaks_of_synchronisation_only() -> None:
    draw = finding("a.py", 1, code="CG201", name="host-rng", family="rng")
    assert silenced("random()  # gpu-sync-ok: no\n", draw) == []


def test_a_call_on_the_way_can_be_silenced() -> None:
    texts = sources(
        a="with graph:\n    f(x)  # graphlint: ignore[host-sync] -- not captured in tests\n",
        b="def f(x):\n    x.item()\n",
    )
    here = finding("b.py", 2, region=RegionRef("a.py", 1, "graph"), trace=(Step("a.py", 2, "f"),))
    other_way = finding("b.py", 2, region=RegionRef("c.py", 1, "graph"), trace=(Step("c.py", 2, "f"),))
    result = suppress.apply(LintResult((here, other_way)), texts, Config(root="/p"))
    assert [item.finding for item in result.suppressed] == [here]
    assert result.suppressed[0].reason == "not captured in tests" and result.suppressed[0].filename == "a.py"
    assert result.findings == (other_way,)


def notes(text: str, config: Config | None = None, **more: object) -> list[tuple[str, int, str]]:
    """Code, row and message of what is said about the suppressions of a text without findings."""
    result = suppress.apply(LintResult((), **more), sources(a=text), config or Config(root="/p"))  # type: ignore[arg-type]
    return [(item.code, item.at.row, item.message) for item in result.findings]


def test_unused_suppressions_are_reported_once() -> None:
    text = "a = 1\nf(\n    b,\n)  # graphlint: ignore[host-sync]\nc = 2  # noqa: CG201, E501\n"
    assert [(code, row) for code, row, _ in notes(text)] == [("CG900", 4), ("CG900", 5)]
    assert "suppresses host-sync" in notes(text)[0][2]


def test_foreign_suppressions_are_never_unused() -> None:
    assert notes("a = 1  # gpu-sync-ok: x\nb = 2  # noqa: E501\nc = 3  # noqa\n") == []


@pytest.mark.parametrize(
    "more",
    [
        {"problems": (Problem("b.py", 1, "is no valid Python"),)},
        {"regions": (RegionInfo("b.py", 1, 2, "graph", "torch.cuda.graph", "a block", resolved=False),)},
    ],
)
def test_unused_is_not_claimed_where_the_analysis_was_incomplete(more: dict[str, object]) -> None:
    text = "a = 1  # graphlint: ignore[host-sync]\n"
    assert notes(text, **more) == []
    assert notes(text) != []


def test_a_name_that_is_no_rule_is_always_reported() -> None:
    open_end = (RegionInfo("b.py", 1, 2, "graph", "torch.cuda.graph", "a block", resolved=False),)
    ((code, _, message),) = notes("a = 1  # graphlint: ignore[hots-sync]\n", regions=open_end)
    assert code == "CG900" and "hots-sync, which is no rule" in message


def test_the_fix_removes_the_comment_and_nothing_else() -> None:
    result = suppress.apply(
        LintResult(()), sources(a="a = 1  # graphlint: ignore\nb = 2  # x # noqa: CG101\n"), Config(root="/p")
    )
    cuts = [edit.at for item in result.findings if item.fix for edit in item.fix.edits]
    assert cuts == [Place("a.py", 1, 6, 1, 27), Place("a.py", 2, 12, 2, 25)]


def test_a_reason_can_be_required() -> None:
    strict = Config(root="/p", require_reason=True)
    text = "x.item()  # graphlint: ignore[host-sync]\ny.item()  # graphlint: ignore[host-sync] -- meant\nz.item()  # gpu-sync-ok\n"
    found = tuple(finding("a.py", row) for row in (1, 2, 3))
    result = suppress.apply(LintResult(found), sources(a=text), strict)
    assert [item.finding.at.row for item in result.suppressed] == [2, 3]
    assert [(item.code, item.at.row) for item in result.findings] == [("CG101", 1), ("CG901", 1)]


@pytest.mark.parametrize(
    "text", ["x = (\n# graphlint: ignore\n", "if 1:\n  x.item()  # noqa: CG101\n y\n", "'''open # noqa: CG101"]
)
def test_text_that_is_no_python_does_no_harm(text: str) -> None:
    assert isinstance(silenced(text), list)


def test_only_linted_files_are_told_about_unused_suppressions() -> None:
    def rows(linted: Iterable[str]) -> list[str]:
        whole = sources(a="a = 1  # graphlint: ignore\n", b="b = 1  # graphlint: ignore\n")
        split = Sources([s for s in whole if s.module in linted], [s for s in whole if s.module not in linted])
        return [item.at.filename for item in suppress.apply(LintResult(()), split, Config(root="/p")).findings]

    assert rows(["a"]) == ["a.py"] and rows(["a", "b"]) == ["a.py", "b.py"]
