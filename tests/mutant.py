"""Planted bug: a change of one place of the code, with the mistake in words."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """One bug: `old` occurs exactly once in `file` and becomes `new`."""

    name: str
    file: str
    old: str
    new: str
    what: str  # the mistake, in words
    tests: tuple[str, ...] = ()  # those that must catch it, of a file that no history runs; empty: histories, then PURE
