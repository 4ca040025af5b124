"""The needs of a site in a run, for `atoll plan --client`: memory by rank, disk, bytes and seconds of a round."""

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from atoll.aggregation.printable import printable_size
from atoll.cli.faults import CommandError
from atoll.cli.printing import say, table

if TYPE_CHECKING:
    from atoll.parallel.planner.candidate import Candidate
    from atoll.parallel.planner.client import ClientNeeds
    from atoll.parallel.planner.shape import ModelShape

LINE = "1Gbit"
"""The default speed of the site's line."""

UNITS = {"bit": 1.0, "kbit": 1e3, "Mbit": 1e6, "Gbit": 1e9, "Tbit": 1e12}
"""Bits per second by unit."""


@dataclass(frozen=True, slots=True)
class Site:
    """The options of `--client`."""

    line: str | None
    codec: str | None
    lora: int | None

    def check_wanted(self, *, is_wanted: bool) -> None:
        """Refuse options of `--client` without it."""
        given = [f"--{name}" for name, value in asdict(self).items() if value is not None]
        if given and not is_wanted:
            raise CommandError(f"{', '.join(given)}: of a site's needs: add --client, or leave it out")


@dataclass(frozen=True, slots=True)
class Found:
    """A site's needs, with the speed of its line [bit/s]."""

    needs: "ClientNeeds"
    line: float

    @property
    def document(self) -> dict[str, Any]:
        """The needs for a script."""
        found = asdict(self.needs)
        for rank, needs in zip(found["ranks"], self.needs.ranks, strict=True):
            rank["memory"]["total"] = needs.memory.total
        times = {name: self.needs.seconds(found[name], self.line) for name in ("down", "up")}
        return {**found, "line": self.line, "seconds": times}


def line_of(text: str) -> float:
    """Return the bits per second that a text such as 100Mbit names.

    Raises:
        CommandError: it names none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT]?bit)(?:/s)?", text.strip())
    if match is None or not float(match[1]):
        raise CommandError(f"--line: got {text!r}; allowed: a number with {', '.join(UNITS)} a second, such as {LINE}")
    return float(match[1]) * UNITS[match[2]]


def check_site(shape: "ModelShape", site: Site) -> None:
    """Check the options before the search.

    Raises:
        CommandError: the line, the codec or the rank of the adapters is none; with all faults.
    """
    from atoll.aggregation.codecs.names import parse_codec
    from atoll.parallel.planner.client import of_adapters

    faults: list[str] = []
    _checked(lambda: line_of(site.line or LINE), "", faults)
    _checked(lambda: site.codec and parse_codec(site.codec), "--codec: ", faults)
    _checked(lambda: site.lora is not None and of_adapters(shape, site.lora), "--lora: ", faults)
    if faults:
        raise CommandError(*faults)


def needs(shape: "ModelShape", candidate: "Candidate", site: Site) -> Found:
    """Return the needs of a site that trains the model by this plan."""
    from atoll.parallel.planner.client import needs_of

    found = needs_of(shape, candidate, codec=site.codec or "", lora=site.lora or 0)
    return Found(found, line_of(site.line or LINE))


def _checked(read: Callable[[], object], key: str, faults: list[str]) -> None:
    """Call a check, and add its fault to the others."""
    try:
        read()
    except (CommandError, ValueError) as error:
        faults.append(f"{key}{error}")


def say_needs(found: Found) -> None:
    """Print the needs of a site."""
    from atoll.parallel.planner.client import AGENT_BYTES, BLOCK_BYTES

    needs, line = found.needs, found.line
    say("\nThe needs of a site with this plan")
    rows = [("version, down", needs.down), ("update, up", needs.up)]
    table(
        ["each round", "bytes", f"at {_speed(line)}"],
        [(name, printable_size(size), _duration(needs.seconds(size, line))) for name, size in rows],
        empty="",
    )
    total = sum(needs.disk.values())
    say("")
    table(
        ["on the site's disk", "bytes"],
        [(name, printable_size(size)) for name, size in [*needs.disk.items(), ("total", total)]],
        empty="",
    )
    spool = needs.disk["updates"]
    if spool > 8 * 2**30:
        say(f"The agent's spool_max_bytes must be at least {spool} (its default is 8 GiB).")
    say("")
    table(
        ["ranks", "in training", "loads", "boxes", "sends"],
        [
            (
                *(_ranks(each.ranks), printable_size(round(each.memory.total)), printable_size(each.held)),
                *(each.boxes, printable_size(each.part)),
            )
            for each in needs.ranks
        ],
        empty="",
    )
    say(
        f"Beside its shards a rank holds {printable_size(BLOCK_BYTES)} while it loads and writes; the agent holds "
        f"{printable_size(AGENT_BYTES)}. No process holds the whole model."
    )


def _ranks(ranks: tuple[int, ...]) -> str:
    """Return ranks as text: 0-3, 8 and 12 more."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][-1] = rank
        else:
            runs.append([rank, rank])
    shown = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs[:3])
    rest = sum(b - a + 1 for a, b in runs[3:])
    return shown + (f" and {rest} more" if rest else "")


def _speed(line: float) -> str:
    unit = next(name for name, bits in reversed(UNITS.items()) if line >= bits or name == "bit")
    return f"{line / UNITS[unit]:.4g} {unit}/s"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
