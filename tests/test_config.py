"""Configuration: what is read from where, and what is said about a mistake in it."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit import finding, project

from graphlint import config
from graphlint.config import Config, ConfigError
from graphlint.selection import exactness, matches, wanted

PYPROJECT = """\
[project]
name = "x"

[tool.graphlint]
select = ["crash", "host-rng"]
ignore = ["CG205"]
target-torch = "2.10"
regions = ["mylib.graphs.capture"]
require-reason = true
exclude = ["third_party"]
src = ["lib"]

[tool.graphlint.per-file-ignores]
"tests/*" = ["ALL"]
"""


def test_everything_is_read(tmp_path: Path) -> None:
    project(tmp_path, {"pyproject.toml": PYPROJECT, "a/b/c.py": ""})
    found = config.find([str(tmp_path / "a/b/c.py")])
    assert found == Config(
        root=str(tmp_path),
        file=str(tmp_path / "pyproject.toml"),
        select=("crash", "host-rng"),
        ignore=("CG205",),
        target_torch=(2, 10),
        regions=("mylib.graphs.capture",),
        require_reason=True,
        exclude=("third_party",),
        src=("lib",),
        per_file_ignores=(("tests/*", ("ALL",)),),
    )


def test_nearest_wins_and_a_pyproject_without_table_is_passed_over(tmp_path: Path) -> None:
    project(
        tmp_path,
        {
            "pyproject.toml": PYPROJECT,
            "a/pyproject.toml": "[project]\nname='a'\n",
            "a/b/graphlint.toml": "require-reason = false\n",
        },
    )
    assert config.find([str(tmp_path / "a")]).file == str(tmp_path / "pyproject.toml")
    assert config.find([str(tmp_path / "a/b")]).file == str(tmp_path / "a/b/graphlint.toml")
    assert config.find([str(tmp_path / "a/b"), str(tmp_path / "a")]).file == str(tmp_path / "pyproject.toml")


def test_graphlint_toml_wins_over_pyproject_beside_it(tmp_path: Path) -> None:
    project(tmp_path, {"pyproject.toml": PYPROJECT, "graphlint.toml": 'target-torch = "2.9"\n'})
    assert config.find([str(tmp_path)]).target_torch == (2, 9)


def test_isolated_reads_nothing(tmp_path: Path) -> None:
    project(tmp_path, {"graphlint.toml": "no toml"})
    assert config.find([str(tmp_path)], isolated=True) == Config(root=str(tmp_path))


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("[tool.graphlint]\n\nselct = []\n", 3, "unknown key `selct`; did you mean `select`?"),
        ("[tool.other]\nselect = 1\n[tool.graphlint]\nselect = 1\n", 4, "must be a list of strings"),
        ("[tool.graphlint]\ntarget_torch = '2.9'\n", 2, "did you mean `target-torch`?"),
        ("[tool.graphlint]\ntarget-torch = '2'\n", 2, "must be a torch release"),
        ("[tool.graphlint]\ntarget-torch = '1.13'\n", 2, "must be 2.6 or newer"),
        ("[tool.graphlint]\nignore = ['CG999']\n", 2, "names no rule `CG999`"),
        ("[tool.graphlint]\nignore = ['C']\n", 2, "names no rule `C`"),
        ("[tool.graphlint]\nignore = ['hots-sync']\n", 2, "did you mean `host-sync`?"),
        ("[tool.graphlint]\nregions = ['a b']\n", 2, "no qualified name"),
        ("[tool.graphlint]\noutput-format = 'xml'\n", 2, "must be one of full, concise"),
        ("[tool.graphlint]\nrequire-reason = 'yes'\n", 2, "must be true or false"),
        ("[tool.graphlint]\nselect = [\n", 2, "no valid TOML"),
        ("[tool]\ngraphlint = 3\n", 0, "is no table"),
    ],
)
def test_mistakes_name_file_and_line(tmp_path: Path, text: str, line: int, words: str) -> None:
    file = project(tmp_path, {"pyproject.toml": text}) / "pyproject.toml"
    with pytest.raises(ConfigError) as raised:
        config.find([str(tmp_path)])
    assert str(raised.value).startswith(f"{file}:{line}:" if line else f"{file}:")
    assert words in str(raised.value)


def test_mistakes_in_files_named_by_hand(tmp_path: Path) -> None:
    project(tmp_path, {"pyproject.toml": "[project]\n", "bad.toml": b"\xff"})
    with pytest.raises(ConfigError, match=r"has no \[tool.graphlint\] table"):
        config.load(str(tmp_path / "pyproject.toml"))
    with pytest.raises(ConfigError, match="UTF-8"):
        config.load(str(tmp_path / "bad.toml"))
    with pytest.raises(ConfigError, match="can't be read: no such file"):
        config.load(str(tmp_path / "gone.toml"))


def test_inline_settings() -> None:
    base = Config(root="/")
    assert config.parse_inline('target-torch = "2.8"', base).target_torch == (2, 8)
    with pytest.raises(ConfigError, match="unknown key"):
        config.parse_inline("no-such = 1", base)
    with pytest.raises(ConfigError, match="neither a file nor"):
        config.parse_inline("a = b", base)


@pytest.mark.parametrize(
    ("select", "ignore", "is_wanted"),
    [
        (["ALL"], [], True),
        (["ALL"], ["CG1"], False),
        (["CG101"], ["CG1"], True),  # the more exact one wins
        (["CG1"], ["CG101"], False),
        (["host-sync"], ["host-sync"], False),  # equally exact: ignored
        (["crash"], [], True),
        (["silent"], [], False),
        (["rng"], [], False),
        ([], [], False),
    ],
)
def test_the_more_exact_selector_wins(select: list[str], ignore: list[str], is_wanted: bool) -> None:
    settings = Config(root="/", select=tuple(select), ignore=tuple(ignore))
    assert wanted(finding("a.py", 1), settings) is is_wanted


def test_a_family_is_less_exact_than_its_rule() -> None:
    other = finding("a.py", 1, code="CG103", name="checked-linalg")
    assert exactness("host-sync", other) < exactness("CG103", other)
    assert exactness("rng", other) < 0


@pytest.mark.parametrize(
    ("name", "pattern", "fits"),
    [
        ("/p/tests/a.py", "tests/*", True),
        ("/p/tests/x/a.py", "tests", True),
        ("/p/src/a.py", "tests/*", False),
        ("/p/src/__init__.py", "__init__.py", True),
        ("/p/src/deep/a.py", "src/**/a.py", True),
        ("/p/src/a.py", "src/**/a.py", True),
        ("/p/src/a.py", "!src/*", False),
    ],
)
def test_per_file_patterns(name: str, pattern: str, fits: bool) -> None:
    assert matches(name, pattern, "/p") is fits


def test_per_file_ignores_take_effect() -> None:
    settings = Config(root="/p", per_file_ignores=(("tests/*", ("CG1",)),))
    assert not wanted(finding("/p/tests/a.py", 1), settings)
    assert wanted(finding("/p/src/a.py", 1), settings)
    assert wanted(finding("/p/tests/a.py", 1, code="CG201", name="host-rng", family="rng"), settings)
