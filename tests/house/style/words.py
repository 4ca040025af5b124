"""The style of a text: its first word, its length, and turns that say less than they seem to.

CONTRIBUTING.md states the style. A docstring's first line is a noun phrase ("The admission of updates to one round.")
or a verb with its object ("Return the manifest of a version."), so the openings below are those of neither: question
words, pronouns without a noun, prepositions, conjunctions, adverbs, and verbs that do not say what is done.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

_OPENINGS = {
    "a question word": "what who whom whose whoever which whichever whatever where wherever whether why how however",
    "a pronoun": "it they them he she we you i those that there here none everyone everybody everything nobody nothing"
    " somebody someone something anybody anyone anything",
    "a preposition": "of to with without within for from in into inside on onto at by per via under over above below"
    " beneath beyond after before behind between during through throughout until till upon among beside besides"
    " against about across along around outside toward towards like unlike except despite",
    "a conjunction": "if as so because since when whenever while whilst although though unless whereas once and or but"
    " nor than then thus hence therefore otherwise",
    "an adverb": "not never always also again now afterwards yet perhaps maybe",
    "an auxiliary verb": "is are was were has have had does did can cannot could may might must shall should will"
    " would",
    "a bare value": "true false yes",
}
OPENINGS = {word: kind for kind, words in _OPENINGS.items() for word in words.split()}
"""Words that do not begin a docstring, each with its kind. Articles and quantifiers ("Each", "All", "No") may."""

FEWEST_WORDS = 3
"""A docstring of one line with fewer words has no content beside the name."""

UNITS = {
    *("bytes", "byte", "kib", "mib", "gib", "mb", "gb", "bits", "s", "ms", "us", "seconds", "milliseconds", "minutes"),
    *("hours", "days", "elements", "flop/s", "bytes/s", "tokens/s", "examples/s", "rounds", "percent", "pixels"),
}
"""Units [bytes], with or without brackets: a property or a magic method may restate its name with one of them."""

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
}
TURNS = [
    (re.compile(r"\b(?:" + turn.replace(" ", r"\s+") + r")\b", re.IGNORECASE), advice)
    for turn, advice in _TURNS.items()
]
"""Turns that are banned anywhere in a text, with what to write in their place."""

_FIRST_WORD = re.compile(r"[\"'(*_]*([A-Za-z]+)(?!\w*-\w)(?![\w/])")
_CODE = re.compile(r"(`+)(?:(?!\n\s*\n)[^`])+\1")


class Remark(NamedTuple):
    """A break of the style, `line` lines below the text's first one."""

    line: int
    text: str


def opening(text: str) -> Remark | None:
    """Judge the first word of a docstring; a compound ("On-disk"), an acronym and code are no such word."""
    found = _FIRST_WORD.match(text.lstrip())
    if found is None or (len(found[1]) > 1 and found[1].isupper()):
        return None
    kind = OPENINGS.get(found[1].lower())
    if kind is None:
        return None
    return Remark(0, f'opens with {kind}, "{found[1]}": begin with a noun phrase or a verb with its object')


def brevity(text: str, *, may_be_unit: bool = False) -> Remark | None:
    """Judge a docstring of one line by its number of words; `may_be_unit` lets through one that names a unit."""
    words = text.split()
    if "\n" in text.strip() or len(words) >= FEWEST_WORDS:
        return None
    if may_be_unit and any(word.strip(".,;:[]()").lower() in UNITS for word in words):
        return None
    return Remark(0, f'"{" ".join(words)}" has fewer than {FEWEST_WORDS} words: say more than the name does')


def turns(text: str) -> Iterator[Remark]:
    """Yield the banned turns of a text, outside of inline code, in their order."""
    plain = blanked(text, _CODE)
    found = sorted((match.start(), match[0], advice) for turn, advice in TURNS for match in turn.finditer(plain))
    for start, turn, advice in found:
        yield Remark(plain.count("\n", 0, start), f'"{" ".join(turn.split())}": {advice}')


def blanked(text: str, pattern: re.Pattern[str]) -> str:
    """Replace what a pattern finds by blanks, so that everything else keeps its line."""
    return pattern.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
