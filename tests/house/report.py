"""The report: the faults of each check, and a table with one line per check."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tests.house.tree import Fault

SHOWN = 30
"""Faults of one check that are listed unless all are asked for."""


@dataclass(frozen=True)
class Check:
    """One check: what it measured, its bound, and what breaks the bound."""

    name: str
    value: int | str
    bound: int | None = None  # none: for information
    faults: Sequence[Fault] = field(default=())
    more: str = "all of them: --full"  # how to list those that are left out
    shown: int = SHOWN

    @property
    def is_ok(self) -> bool:
        """Whether the bound holds."""
        return self.bound is None or not self.faults

    @property
    def verdict(self) -> str:
        """The last column of the table."""
        return "-" if self.bound is None else "ok" if self.is_ok else "NOT OK"


def rendered(checks: Sequence[Check], *, is_full: bool = False) -> str:
    """Return the faults of each check, those beyond `Check.shown` only in a full report, and the table."""
    parts = [listed(check, None if is_full else check.shown) for check in checks if check.faults]
    return "\n\n".join([*parts, table(checks)])


def listed(check: Check, shown: int | None) -> str:
    """Return the faults of a check below its name; where some are left out, the count of each room."""
    lines = [f"{check.name}: {len(check.faults)}", *(f"  {fault}" for fault in check.faults[:shown])]
    if shown is not None and len(check.faults) > shown:
        lines.append(f"  and {len(check.faults) - shown} more; {check.more}")
        lines.append(f"  in all: {by_room(check.faults)}")
    return "\n".join(lines)


def by_room(faults: Iterable[Fault]) -> str:
    """Count faults by the first folder of their paths."""
    counted = Counter(fault.path.split("/", 1)[0] for fault in faults)
    return ", ".join(f"{room} {count}" for room, count in counted.most_common())


def table(checks: Sequence[Check]) -> str:
    """Return a table with value, bound and verdict of each check."""
    rows = [("check", "value", "bound", "")]
    rows += [
        (check.name, str(check.value), "-" if check.bound is None else str(check.bound), check.verdict)
        for check in checks
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [f"{a:{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}  {d}".rstrip() for a, b, c, d in rows]
    return "\n".join(lines)
