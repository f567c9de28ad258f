"""Arguments of calls, matched to parameters by position or name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from graphlint.regions.names import Argument


def passed(name: str, position: int, given: Sequence[Argument]) -> Iterator[Argument]:
    """The argument for the parameter `name` at `position` (-1: keyword only)."""
    positional = [one for one in given if one.name in ("", "*")]
    if 0 <= position < len(positional) and all(one.name == "" for one in positional[: position + 1]):
        yield positional[position]
        return
    for one in given:
        if one.name == name:
            yield one


def taken(names: Iterable[str], given: Sequence[Argument]) -> tuple[Argument, ...]:
    """The arguments for the first parameters, called `names`."""
    return tuple(one for position, name in enumerate(names) for one in passed(name, position, given))
