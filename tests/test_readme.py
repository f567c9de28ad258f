"""What the README shows is what happens."""

from __future__ import annotations

import re
from pathlib import Path

from kit import command, project

from graphlint import config
from graphlint.config import tomllib

README = (Path(__file__).parent.parent / "README.md").read_text()


def block(kind: str, number: int = 0) -> str:
    """The text of the nth code block of a kind."""
    return re.findall(rf"^```{kind}\n(.*?)^```", README, re.S | re.M)[number]


def test_the_first_report_is_what_the_first_program_gets(tmp_path: Path) -> None:
    project(tmp_path, {"engine.py": block("py"), "model.py": block("py", 1)})
    prompt, report = block("text").split("\n", 1)
    done = command(*prompt.removeprefix("$ graphlint ").split(), cwd=tmp_path)
    assert done.stdout == report and done.returncode == 1


def test_the_configuration_shown_is_accepted(tmp_path: Path) -> None:
    project(tmp_path, {"pyproject.toml": block("toml")})
    found = config.find([str(tmp_path)])
    assert found.target_torch == (2, 11) and found.require_reason
    assert set(tomllib.loads(block("toml"))["tool"]["graphlint"]) <= {
        name.replace("_", "-") for name in config._READERS
    }


def test_the_options_shown_exist(tmp_path: Path) -> None:
    text = command("check", "--help", cwd=tmp_path).stdout
    shown = re.findall(r"^    graphlint.*", README, re.M)
    assert len(shown) > 4
    for option in re.findall(r"--[a-z-]+", " ".join(shown)):
        assert option in text


def test_links_lead_somewhere() -> None:
    top = Path(__file__).parent.parent
    missing = [link for link in re.findall(r"\]\(([^)#:]+)\)", README) if not (top / link).exists()]
    assert not missing
