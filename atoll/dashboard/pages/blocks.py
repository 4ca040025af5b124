"""The blocks of a page: facts, tables, sentences, curves, bars, a grid of fates, and forms."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal
from urllib.parse import quote

from atoll.dashboard.charts import Bars, Chart
from atoll.dashboard.pages import addresses
from atoll.ground.printable import count_of, printable, printable_size

JSON_HAS_ALL = "the page with .json at its end has all"

TEXT_MAX = 400
"""Largest number of characters of a cell; the rest is left out, as `…` says."""

GLYPHS = {
    "reported": "✓",
    "counted": "✓",
    "committed": "✓",
    "finished": "✓",
    "member": "✓",
    "opened": "✓",
    "approved": "✓",
    "allowed": "✓",
    "joined": "…",
    "waiting": "…",
    "selecting": "…",
    "collecting": "…",
    "securing": "…",
    "aggregating": "…",
    "running": "▸",
    "paused": "‖",
    "pausing": "‖",
    "queued": "…",
    "invited": "…",
    "late": "◷",
    "straggler": "◷",
    "carried": "↷",
    "released": "–",
    "failed": "✗",
    "abandoned": "✗",
    "stopped": "✗",
    "unreadable": "✗",
    "interrupted": "‖",
    "refused": "⊘",
    "rejected": "⊘",
    "dropped": "⊘",
    "undecided": "…",
    "revoked": "⊘",
    "lost": "⌁",
    "lapsed": "◷",
}
"""A sign for each state, so that no state is told by its colour alone."""


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Args:
        text: its text, on one line.
        href: the address of a page about it; empty: none.
        mark: the state that gives it sign and colour; empty: none.
    """

    text: str
    href: str = ""
    mark: str = ""

    @property
    def glyph(self) -> str:
        """The sign of its state."""
        return GLYPHS.get(self.mark, "")


@dataclass(frozen=True)
class Facts:
    """Names with a value each."""

    title: str
    rows: Sequence[tuple[str, Cell]]
    kind: Literal["facts"] = "facts"


@dataclass(frozen=True)
class Field:
    """An input of a form.

    Args:
        name: its name in the address, or in what is sent.
        label: its label.
        value: its present value.
        choices: the allowed values; empty: any text.
    """

    name: str
    label: str
    value: str
    choices: Sequence[str] = ()


@dataclass(frozen=True)
class TableBlock:
    """A table.

    Args:
        title: its title.
        columns: the heads of its columns.
        rows: its rows, whose first cell names the row.
        note: a sentence below it, such as what is left out; empty: none.
        empty: the sentence in its place, where there are no rows.
        links: other pages of it: their text and address.
        fields: the form that narrows it.
        hidden: further values that the form keeps in the address.
        chosen: the value of the box before each row, with which the form `compare` of the page is sent; empty: none.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""
    empty: str = "none"
    links: Sequence[tuple[str, str]] = ()
    fields: Sequence[Field] = ()
    hidden: Sequence[tuple[str, str]] = ()
    chosen: Sequence[str] = ()
    kind: Literal["table"] = "table"

    @property
    def names(self) -> Sequence[str]:
        """Names of the rows, by which they stay the same elements as others come and go; empty: two have one name."""
        names = [row[0].text for row in self.rows]
        return names if len({*names}) == len(names) else ()


@dataclass(frozen=True)
class Sentences:
    """Sentences, or the lines of a log.

    Args:
        title: the title.
        lines: the sentences.
        is_log: whether they are the lines of a log.
        note: a sentence below them; empty: none.
        links: pages about them: their text and address.
    """

    title: str
    lines: Sequence[str]
    is_log: bool = False
    note: str = ""
    links: Sequence[tuple[str, str]] = ()
    kind: Literal["sentences"] = "sentences"


@dataclass(frozen=True)
class Text:
    """A text of several lines, folded until a click."""

    title: str
    text: str
    kind: Literal["text"] = "text"


@dataclass(frozen=True)
class Curves:
    """Pictures of curves, one for each metric."""

    title: str
    charts: Sequence[Chart]
    note: str = ""
    kind: Literal["curves"] = "curves"


@dataclass(frozen=True)
class Timeline:
    """A bar for each client of a round."""

    title: str
    bars: Bars
    note: str = ""
    kind: Literal["timeline"] = "timeline"


@dataclass(frozen=True)
class Grid:
    """The fates of clients by round.

    Args:
        title: its title.
        rounds: the numbers of the rounds.
        rows: for each client its name and its fate in each round; an empty cell: it was not invited.
        note: what is left out; empty: nothing.
    """

    title: str
    rounds: Sequence[Cell]
    rows: Sequence[tuple[Cell, Sequence[Cell]]]
    note: str = ""
    kind: Literal["grid"] = "grid"


@dataclass(frozen=True)
class Form:
    """A form that changes something, or that leads to such a form.

    Args:
        title: its title.
        action: the address that it is sent to.
        button: the text of its button.
        fields: its inputs.
        token: the token of the visitor's forms; empty: it leads to a page.
        note: a sentence below it.
        id: its name, by which boxes elsewhere on the page belong to it; empty: none do.
        hidden: further values that are sent.
        others: further buttons: their texts, and the addresses that they send the form to.
    """

    title: str
    action: str
    button: str
    fields: Sequence[Field] = ()
    token: str = ""
    note: str = ""
    id: str = ""
    hidden: Sequence[tuple[str, str]] = ()
    others: Sequence[tuple[str, str]] = ()
    kind: Literal["form"] = "form"


Block = Facts | TableBlock | Sentences | Text | Curves | Timeline | Grid | Form


@dataclass(frozen=True)
class Page:
    """A page.

    Args:
        title: its title.
        trail: the pages above it: their text and address.
        tabs: the pages beside it: their text and address.
        blocks: its contents.
        run: the key of the run whose news change it; empty: none.
        lead: a few words beside the title; empty: none.
        every: the seconds after which it is read again, as nothing tells of its news; 0: it is not.
    """

    title: str
    blocks: Sequence[Block]
    trail: Sequence[tuple[str, str]] = ()
    tabs: Sequence[tuple[str, str]] = ()
    run: str = ""
    lead: str = ""
    every: int = 0

    @property
    def keys(self) -> list[str]:
        """Keys of the blocks, by which their elements stay the same as others come and go."""
        found, seen = list[str](), Counter[str]()
        for block in self.blocks:
            seen[key := quote(block.title.replace(" ", "-"))] += 1
            found.append(key if seen[key] == 1 else f"{key}-{seen[key]}")
        return found


def cell(value: Any, href: str = "", mark: str = "") -> Cell:
    """Return a plain value as a cell: on one line, in printable characters, `-` for none."""
    return Cell(shown(value), href, mark)


def shown(value: Any) -> str:
    """Return a plain value as a text on one line, in printable characters, of at most `TEXT_MAX` of them."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    found = printable(" ".join(str(value).split())) or "-"
    return found if len(found) <= TEXT_MAX else found[: TEXT_MAX - 1] + "…"


def distinct(names: Iterable[str]) -> dict[str, str]:
    """Return names as texts that differ, too: of those that look alike, all but one get a number, as in `loss (2)`."""
    found, num = dict[str, str](), Counter[str]()
    taken, names = set[str](), list(names)
    for name in sorted(names, key=lambda name: shown(name) != name):  # a name that shows as it is keeps its text
        label = base = shown(name)
        while label in taken:
            num[base] += 1
            label = f"{base} ({num[base] + 1})"
        taken.add(label)
        found[name] = label
    return {name: found[name] for name in names}


def text(title: str, value: str) -> Text:
    """Return a text of several lines as a block, in printable characters."""
    return Text(title, "\n".join(map(printable, value.splitlines())))


def state_cell(state: str, href: str = "") -> Cell:
    """Return a state with its sign and colour."""
    return Cell(shown(state), href, state if state in GLYPHS else "")


def size(num_bytes: Any) -> Cell:
    """Return a number of bytes for a person."""
    return Cell("-" if num_bytes is None else printable_size(int(num_bytes)))


def instant(at: Any) -> Cell:
    """Return an instant [s since the epoch] as date and time in UTC, which is the same for every reader."""
    return Cell("-" if not at else datetime.fromtimestamp(float(at), UTC).strftime("%Y-%m-%d %H:%M:%S UTC"))


def duration(seconds: Any) -> Cell:
    """Return a duration in seconds, from 600 s on in minutes."""
    if seconds is None:
        return Cell("-")
    return Cell(f"{seconds:.1f} s" if seconds < 600 else f"{seconds / 60:.0f} min")


def left_out(num: int, most: int, what: str, where: str = JSON_HAS_ALL) -> str:
    """Return the note on the rows beyond the `most` that are shown; empty: there are none.

    Args:
        num: the number of rows.
        most: the largest number that is shown.
        what: the noun of a row.
        where: the way to the rest.
    """
    return f"{count_of(num - most, what)} left out: {where}" if num > most else ""


def server_first(sources: Iterable[str]) -> list[str]:
    """Return sources of metrics in the order of their names, the server's first."""
    return sorted(sources, key=lambda source: (source != "server", source))


def troubled_first(fates: Mapping[str, str]) -> list[str]:
    """Return the clients with these fates in the order of their names, those that reported last."""
    return sorted(fates, key=lambda name: (fates[name] == "reported", name))


def page_of_run(
    title: str, blocks: Sequence[Block], place: int, label: str, run_id: str, *, above: str = "", lead: str = ""
) -> Page:
    """Return a page of a deployed run, which its news change, with the pages above and beside it.

    Args:
        title: its title.
        blocks: its contents.
        place: the number of the place.
        label: the name of the place.
        run_id: the run.
        above: the list that the page is of, such as "Sites"; empty: none.
        lead: a few words beside the title.
    """
    trail = addresses.trail(place, label, run_id)
    if above:
        trail.append((above, addresses.of_run(place, run_id, above.lower())))
    return Page(title, blocks, trail, addresses.tabs(place, run_id), addresses.key_of(place, run_id), lead)


def fates_of(grid: Grid) -> list[Cell]:
    """Return the different fates in a grid, for its key."""
    every = (fate for _, fates in grid.rows for fate in fates if fate.mark)
    return list({fate.mark: fate for fate in every}.values())
