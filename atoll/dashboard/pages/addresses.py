"""The addresses of the pages: names are escaped in paths and queries, so any name has a page."""

from collections.abc import Mapping
from urllib.parse import quote, urlencode

from atoll.ground.printable import printable

TABS = (
    ("", "Run"),
    ("rounds", "Rounds"),
    ("sites", "Sites"),
    ("versions", "Versions"),
    ("policy", "Policy"),
    ("privacy", "Privacy"),
)
"""The pages of a deployed run: the end of each address, and its name."""

OF_COORDINATOR = (("members", "Members"), ("statistics", "Statistics"), ("audit", "Audit"), ("alerts", "Alerts"))
"""The pages of a coordinator: the begin of each address, and its name."""


OF_AGENT = (
    ("agents", "Site"),
    ("decisions", "Decisions"),
    ("budgets", "Budgets"),
    ("peers", "Other sites"),
    ("alerts", "Alerts"),
)
"""The pages of a site's agent."""


def of_run(place: int, run: str, page: str = "", **query: object) -> str:
    """Return the address of a page of a run.

    Args:
        place: the number of the place.
        run: the id of the run, or the folder of a simulation.
        page: the end of the address, such as `rounds/3`; empty: the run.
        query: what follows; empty values are left out.
    """
    return _address("runs", place, segment(run), page, query=query)


def of_place(place: int, page: str, **query: object) -> str:
    """Return the address of a page of a place; empty values of the query are left out."""
    return _address(page, place, query=query)


def of_members(place: int, page: str = "", **query: str) -> str:
    """Return the address of the members of a place, or of a page below it; arguments as of `of_run`."""
    return _address("members", place, page, query=query)


def of_agent(place: int, page: str = "", **query: str) -> str:
    """Return the address of what was asked of a site, or of a page below it; arguments as of `of_run`."""
    return _address("agents", place, page, query=query)


def _address(*parts: object, query: Mapping[str, object]) -> str:
    given = {name: value for name, value in query.items() if value not in ("", None, False)}
    return "".join(f"/{part}" for part in parts if part != "") + (f"?{urlencode(given)}" if given else "")


def of_sweep(place: int, folder: str) -> str:
    """Return the address of the comparison of a sweep's cells."""
    return f"/compare?{urlencode({'sweep': key_of(place, folder)})}"


def segment(name: str) -> str:
    """Return a name as one segment of a path: with the escapes of RFC 6901, section 3, for slashes; `~` is `.`."""
    escaped = name.replace("~", "~0").replace("/", "~1")
    return quote("~" if name == "." else escaped, safe="~@")


def name_in(segment: str) -> str:
    """Return the name in a segment that the server has unescaped."""
    return "." if segment == "~" else segment.replace("~1", "/").replace("~0", "~")


def key_of(place: int, run: str) -> str:
    """Return the key by which the stream of news names a run."""
    return f"{place}/{run}"


def other_pages(
    place: int, run: str, page: str, asked: Mapping[str, str], following: str | None, words: tuple[str, str]
) -> list[tuple[str, str]]:
    """Return the first page of a list and the one after this page, as far as this page is neither.

    Args:
        place: the number of the place.
        run: the id of the run.
        page: the end of the address.
        asked: the filters of this page, and its cursor `after`.
        following: the cursor of the next page; None: there is none.
        words: the texts of the two links.
    """
    filters = {name: value for name, value in asked.items() if name != "after"}
    first, following_one = words
    found = [(first, of_run(place, run, page, **filters))] if asked.get("after") else []
    if following is not None:
        found.append((following_one, of_run(place, run, page, **filters, after=following)))
    return found


def trail(place: int, label: str, run: str = "") -> list[tuple[str, str]]:
    """Return the pages above a page: all runs, the place, and the run."""
    above = [("Runs", "/"), (printable(label), f"/?place={place}")]
    return [*above, (printable(run), of_run(place, run))] if run else above


def tabs(place: int, run: str) -> list[tuple[str, str]]:
    """Return the pages beside a page of a deployed run."""
    return [*((name, of_run(place, run, page)) for page, name in TABS), *tabs_of_coordinator(place)]


def tabs_of_agent(place: int) -> list[tuple[str, str]]:
    """Return the pages of a site's agent."""
    return [(name, of_place(place, page)) for page, name in OF_AGENT]


def tabs_of_coordinator(place: int) -> list[tuple[str, str]]:
    """Return the pages of a coordinator."""
    return [(name, of_place(place, page)) for page, name in OF_COORDINATOR]
