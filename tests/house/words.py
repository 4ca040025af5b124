"""Banned turns in docstrings and pages, each with what to write in its place; CONTRIBUTING.md states the style."""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.house.tree import Fault, Module

_ADVICE = {
    r"(those|them|he|she) who": "name the role",
    r"who(so)?ever": "name the role",
    r"(no|every|some|any)body": "name the role, or say it without a person",
    r"so (many|much)": "give the number",
    r"so long": "give the duration",
    r"(is|are|was|were) to be": "say what does it, in the active voice",
    r"com(es?|ing) to nothing|came to nothing": "say what does not happen",
    r"what is said of": "use the noun",
    r"it is said": "say which component reports it",
    r"of (one|(a|the) user)'s own": 'write "custom"',
    r"mend(s|ed|ing)?": "say which fault is removed, or what is checked",
    r"end(s|ed)? in order": "say that it ends cleanly, or shuts down",
    r"goes on": 'write "continues" or "resumes"',
    r"(beg[aiu]ns?|starts?|started|reads?|made|drawn|dealt|enrols?|compared) anew": 'write "again"',
    r"(is|are|was|were) (another one|others) than": 'write "differs from"',
}
_TURNS = [
    (re.compile(r"\b(?:" + turn.replace(" ", r"\s+") + r")\b", re.IGNORECASE), advice)
    for turn, advice in _ADVICE.items()
]

_CODE = re.compile(r"(`+)(?:(?!\n\s*\n)[^`])+\1")
_BLOCK = re.compile(r"^[ >]*(```+|~~~+)[^\n]*\n.*?^[ >]*\1[`~ ]*$", re.MULTILINE | re.DOTALL)
"""A fenced block of a page."""


def turns(text: str) -> Iterator[tuple[int, str]]:
    """Yield the banned turns of a text outside of inline code, each with the lines above it and the advice."""
    plain = _without(_CODE, text)
    found = sorted((match.start(), match[0], advice) for turn, advice in _TURNS for match in turn.finditer(plain))
    for start, turn, advice in found:
        yield plain.count("\n", 0, start), f'"{" ".join(turn.split())}": {advice}'


def in_docstrings(modules: Iterable[Module]) -> list[Fault]:
    """Report the banned turns of every docstring: the strings that stand alone, those below assignments too."""
    return [
        Fault(module.path, statement.lineno + above, remark)
        for module in modules
        for statement in module.statements
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        for above, remark in turns(str(statement.value.value))
    ]


def in_pages(root: Path, pages: Iterable[Path]) -> list[Fault]:
    """Report the banned turns of pages outside of their blocks of code."""
    return [
        Fault(page.relative_to(root).as_posix(), 1 + above, remark)
        for page in pages
        for above, remark in turns(_without(_BLOCK, page.read_text("utf-8")))
    ]


def pages_at(place: Path) -> list[Path]:
    """Return a page, or the pages below a folder."""
    if place.is_file():
        return [place] if place.suffix == ".md" else []
    return sorted(place.rglob("*.md"))


def _without(pattern: re.Pattern[str], text: str) -> str:
    """Replace what a pattern finds by blanks, so that everything else keeps its line."""
    return pattern.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
