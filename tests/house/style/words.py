"""Turns of a text that say less than they seem to; CONTRIBUTING.md states the style."""

import re
from collections.abc import Iterator
from typing import NamedTuple

_TURNS = {
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
TURNS = [
    (re.compile(r"\b(?:" + turn.replace(" ", r"\s+") + r")\b", re.IGNORECASE), advice)
    for turn, advice in _TURNS.items()
]
"""Turns that are banned anywhere in a text, with what to write in their place."""

_CODE = re.compile(r"(`+)(?:(?!\n\s*\n)[^`])+\1")


class Remark(NamedTuple):
    """A break of the style, `line` lines below the text's first one."""

    line: int
    text: str


def turns(text: str) -> Iterator[Remark]:
    """Yield the banned turns of a text, outside of inline code, in their order."""
    plain = blanked(text, _CODE)
    found = sorted((match.start(), match[0], advice) for turn, advice in TURNS for match in turn.finditer(plain))
    for start, turn, advice in found:
        yield Remark(plain.count("\n", 0, start), f'"{" ".join(turn.split())}": {advice}')


def blanked(text: str, pattern: re.Pattern[str]) -> str:
    """Replace what a pattern finds by blanks, so that everything else keeps its line."""
    return pattern.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
