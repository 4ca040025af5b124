"""Members that refuse each other, and those that another attempt is without. Pure.

A member refuses another one's keys or boxes: it is not pinned there, its chain has forked, its box does not open. One
of the two may lie, and the coordinator cannot tell which. Refusals are the edges of a graph; the members that are left
out are a vertex cover of it.
"""

from collections.abc import Collection, Iterable


def left_out(refusals: Iterable[tuple[str, str]], members: Collection[str]) -> frozenset[str]:
    """Return the members without which no two of the others refuse each other.

    The member with most conflicts is left out first, until none is left: one that most others refuse loses its place,
    and so does one that refuses two or more. A single liar costs others one place at most, and loses its place with the
    next lie: of two that conflict with no other member, the refused one is left out, then the one that refuses.

    Args:
        refusals: pairs of the member that refuses and the refused one, of all attempts.
        members: those that may be in another attempt; refusals of and by others do not count.
    """
    pairs = {(by, of) for by, of in refusals if by != of and by in members and of in members}
    out: set[str] = set()
    while pairs:
        others: dict[str, set[str]] = {}
        accusers: dict[str, set[str]] = {}
        for by, of in pairs:
            others.setdefault(by, set()).add(of)
            others.setdefault(of, set()).add(by)
            accusers.setdefault(of, set()).add(by)
        worst = max(sorted(others), key=lambda name: (len(others[name]), len(accusers.get(name, ()))))
        out.add(worst)
        pairs = {pair for pair in pairs if worst not in pair}
    return frozenset(out)
