"""What is read for each page: of a request the document of `.json`, and the function that makes the page."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from atoll.dashboard.pages import (
    addresses,
    agents,
    alerts,
    audit,
    compare,
    privacy,
    rounds,
    run,
    runs,
    simulated,
    sites,
    statistics,
    versions,
)
from atoll.dashboard.pages.blocks import Page, Sentences
from atoll.dashboard.sources import Source
from atoll.ground.printable import printable
from atoll.interface.agents import Agent
from atoll.interface.deployed import AWAY
from atoll.interface.errors import AtollError
from atoll.interface.side_by_side import Run, side_by_side

COUNT, COUNT_MAX = 100, 1_000
"""Rows of a page of a list: by default, and at most."""

POLICY_ROUNDS = 1_000
"""Number of the newest rounds over which the page of the policy counts."""

SITE_ROUNDS = 25
"""Number of the newest rounds on the page of a site."""

FATES_OF_SITE = 300
"""Number of the newest rounds in which the fates of a site are looked for."""

Document = Any
Answer = tuple[Document, Callable[[], Page]]
"""The document of `.json`, or the error that the command ends with; and the function that makes the page."""


@dataclass(frozen=True)
class Asked:
    """What a request asks for.

    Args:
        source: the place.
        run: the run in it.
        path: the other parts of the address.
        query: the values after `?`.
    """

    source: Source
    run: str
    path: Mapping[str, Any]
    query: Mapping[str, str]
    lines: Sequence[tuple[float, str]] = ()
    """The newest lines of the run's log, if it is followed."""
    token: str = ""
    """The token of the visitor's forms on the page of a site; empty: there are none."""

    def only(self, *names: str) -> dict[str, str]:
        """Return some values of the query that are not empty."""
        return {name: self.query[name] for name in names if self.query.get(name)}

    @property
    def count(self) -> int:
        """The rows of a page.

        Raises:
            AtollError: it is no number, or too large.
        """
        return self.whole("count", 1, COUNT_MAX, COUNT)

    def whole(self, name: str, least: int, most: int, default: int = 0) -> int:
        """Return a value of the query that is a whole number.

        Raises:
            AtollError: it is no number, or out of the range.
        """
        text = self.query.get(name, "") or str(default)
        if not (text.isascii() and text.isdecimal()) or not least <= int(text[:20]) <= most:
            raise AtollError(f"{name}: got {text[:80]!r}; allowed: {least} to {most:,}")
        return int(text[:20])


def of_run(asked: Asked) -> Answer:
    """Return a run."""
    source = asked.source
    if (found := source.simulated(asked.run)) is not None:
        document = found.document
        page = partial(simulated.run, source.number, source.label, asked.run, document, found.lines, found.settings)
        return document, page
    here = source.deployed(asked.run)
    document, toml = here.shown()

    def make() -> Page:
        newest = here.page("rounds", count=run.ROUNDS_MAX, last=True).rows
        return run.run(source.number, source.label, document, toml, newest, here.fates(run.ROUNDS_MAX), asked.lines)

    return document, make


def of_rounds(asked: Asked) -> Answer:
    """Return the rounds of a run."""
    source = asked.source
    if (found := source.simulated(asked.run)) is not None:
        page = partial(simulated.run, source.number, source.label, asked.run, found.document, found.lines, "")
        return found.lines, page
    filters = asked.only("state", "client", "fate", "text")
    after = asked.query.get("after", "")
    seen = source.deployed(asked.run).page("rounds", count=asked.count, after=after, last=True, where=filters)
    given = filters | asked.only("after", "count")
    return seen.rows, partial(rounds.rounds, source.number, source.label, asked.run, seen.rows, seen.next, given)


def of_round(asked: Asked) -> Answer:
    """Return a round."""
    source, number = asked.source, asked.path["number"]
    if (found := source.simulated(asked.run)) is not None:
        line = next((line for line in found.lines if line["round"] == number), None)
        if line is None:
            raise AtollError(f"the run {asked.run} has no round {number} (it has {len(found.lines)})")
        return line, partial(simulated.round_, source.number, source.label, asked.run, line)
    record = source.deployed(asked.run).round(number).record
    return record, partial(rounds.round_, source.number, source.label, asked.run, record, time.time())


def of_sites(asked: Asked) -> Answer:
    """Return the clients of a run."""
    source = asked.source
    filters = asked.only("state", "prefix", "text")
    after = asked.query.get("after", "")
    seen = source.deployed(asked.run).page("clients", count=asked.count, after=after, where=filters)
    given = filters | asked.only("after", "count")
    return seen.rows, partial(sites.sites, source.number, source.label, asked.run, seen.rows, seen.next, given)


def of_site(asked: Asked) -> Answer:
    """Return a site."""
    source, here, name = asked.source, asked.source.deployed(asked.run), asked.query.get("name", "")
    rows = here.page("clients", count=1, where={"prefix": name}).rows
    client = next((row for row in rows if row["client"] == name), None)

    def make() -> Page:
        own = here.page("rounds", count=SITE_ROUNDS, last=True, where={"client": name}).rows
        fates, metrics = here.fates(FATES_OF_SITE), here.site_metrics
        return sites.site(source.number, source.label, asked.run, name, client, own, fates, metrics)

    return client, make


def of_versions(asked: Asked) -> Answer:
    """Return the versions of a run."""
    source, here = asked.source, asked.source.deployed(asked.run)
    seen = here.page("versions", count=asked.count, after=asked.query.get("after", ""), last=True)
    given = asked.only("after", "count")

    def make() -> Page:
        document = here.facts
        return versions.versions(source.number, source.label, document, seen.rows, seen.next, given)

    return seen.rows, make


def of_policy(asked: Asked) -> Answer:
    """Return what the policy of a run has decided."""
    source, here = asked.source, asked.source.deployed(asked.run)
    rows = here.page("rounds", count=POLICY_ROUNDS, last=True).rows
    return rows, lambda: rounds.policy(source.number, source.label, here.facts, rows)


def of_members(asked: Asked) -> Answer:
    """Return the members of a coordinator."""
    source, rows = asked.source, list(asked.source.federation().members)
    given = asked.only("role", "standing", "text")
    return rows, lambda: runs.members(source.number, source.label, rows, **given)


def of_privacy(asked: Asked) -> Answer:
    """Return the guarantee of a run, and the sessions of its secure sums."""
    source, here = asked.source, asked.source.deployed(asked.run)
    guarantee = here.privacy

    def make() -> Page:
        rows, sums = here.page("rounds", count=POLICY_ROUNDS, last=True).rows, list(here.sums())
        return privacy.privacy(source.number, source.label, asked.run, guarantee, sums, rows)

    return guarantee, make


def of_statistics(asked: Asked) -> Answer:
    """Return a kept result of statistics of the sites' data; no site is asked."""
    source, number = asked.source, asked.whole("number", 0, 2**31 - 1)
    here = source.federation()
    try:
        found = here.statistics(number=number)
    except AtollError as error:
        if number or error.code == AWAY:
            raise
        return error, _without(source, "Statistics", error)
    return found, lambda: statistics.statistics(source.number, source.label, found)


def of_audit(asked: Asked) -> Answer:
    """Return the audit log of a coordinator, with its proof."""
    source, count, before = asked.source, asked.count, asked.whole("before", 0, 2**53)
    given = asked.only("action", "actor", "before", "count")
    filters, here = asked.only("action", "actor"), source.federation()
    try:
        found = here.audit(count=count, before=before, **filters)
    except AtollError as error:
        if error.code == AWAY or before or filters:
            raise
        return error, _without(source, "Audit", error)
    return found, lambda: audit.audit(source.number, source.label, "audit", found, source.proof(), given, count=count)


def of_alerts(asked: Asked) -> Answer:
    """Return the conditions that hold now, at a coordinator or a site."""
    source, is_agent = asked.source, isinstance(asked.source.place, Agent)
    rows = list(source.agent().alerts if is_agent else source.federation().alerts)
    return rows, lambda: alerts.alerts(source.number, source.label, rows, is_agent=is_agent)


def of_requests(asked: Asked) -> Answer:
    """Return what was asked of a site, and its spool."""
    source, here = asked.source, asked.source.agent()
    rows, given = list(here.runs), asked.only("standing", "text")
    return rows, lambda: agents.requests(source.number, source.label, rows, list(here.spool), given, asked.token)


def of_decisions(asked: Asked) -> Answer:
    """Return the log of a site's decisions, with its proof and the rules that have decided."""
    source, count, before = asked.source, asked.count, asked.whole("before", 0, 2**53)
    given = asked.only("action", "actor", "before", "count")
    filters, here = asked.only("action", "actor"), asked.source.agent()
    try:
        found = here.decisions(count=count, before=before, **filters)
    except AtollError as error:
        if before or filters:
            raise
        return error, _without(source, "Decisions", error)

    def make() -> Page:
        number, label = source.number, source.label
        page = audit.audit(number, label, "decisions", found, source.proof(), given, count=count)
        newest = here.decisions(count=COUNT_MAX, before=0, **filters)["events"]
        return replace(page, blocks=[page.blocks[0], agents.by_rule(newest), *page.blocks[1:]])

    return found, make


def of_budgets(asked: Asked) -> Answer:
    """Return the privacy budgets of a site's data."""
    source, found = asked.source, asked.source.agent().budgets()
    return found, lambda: agents.budgets(source.number, source.label, found)


def of_peers(asked: Asked) -> Answer:
    """Return the sites with which a site joins secure sums."""
    source, rows = asked.source, list(asked.source.agent().peers)
    return rows, lambda: agents.peers(source.number, source.label, rows)


PAGES: Sequence[tuple[str, Callable[[Asked], Answer]]] = (
    ("/runs/{place:number}/{run}/rounds/{number:number}", of_round),
    ("/runs/{place:number}/{run}/rounds", of_rounds),
    ("/runs/{place:number}/{run}/sites", of_sites),
    ("/runs/{place:number}/{run}/site", of_site),
    ("/runs/{place:number}/{run}/versions", of_versions),
    ("/runs/{place:number}/{run}/policy", of_policy),
    ("/runs/{place:number}/{run}/privacy", of_privacy),
    ("/members/{place:number}", of_members),
    ("/statistics/{place:number}", of_statistics),
    ("/audit/{place:number}", of_audit),
    ("/alerts/{place:number}", of_alerts),
    ("/agents/{place:number}", of_requests),
    ("/decisions/{place:number}", of_decisions),
    ("/budgets/{place:number}", of_budgets),
    ("/peers/{place:number}", of_peers),
    ("/runs/{place:number}/{run}", of_run),
)
"""The addresses of the pages, and what is read for each."""


def compared(
    sources: Mapping[int, Source], keys: Sequence[str], *, sweep: str = "", metric: str = "", over: str = ""
) -> Answer:
    """Return chosen runs, or the cells of a sweep, side by side.

    Args:
        sources: the places by their numbers.
        keys: the chosen runs, such as `1/digits-1`.
        sweep: the folder of a sweep in its place instead, such as `2/results/sweep`; empty: none.
        metric: the metric; empty: the first that is no loss.
        over: what it is drawn over; empty: rounds.

    Raises:
        AtollError: too few or too many runs are chosen, there is no such place, or none has measured the metric.
    """
    num_left, title, chosen = 0, "", [*dict.fromkeys(keys)]
    if sweep:
        source, folder = _placed(sources, sweep)
        title = folder or source.label
        of_sweep = [name for name in source.names() if name.rpartition("/")[0] == folder]
        num_left = max(0, len(of_sweep) - compare.CELLS_MAX)
        chosen = [addresses.key_of(source.number, name) for name in of_sweep[: compare.CELLS_MAX]]
        if not chosen:
            raise AtollError(f"sweep: got {folder!r}; {source.label} has no simulations in such a folder")
    elif not 2 <= len(chosen) <= compare.RUNS_MAX:
        allowed = f"2 to {compare.RUNS_MAX}: choose them by their boxes on the page of all runs"
        raise AtollError(f"compare: got {len(chosen)}; allowed: {allowed}")
    placed = [_placed(sources, key) for key in chosen]
    names = [run for _, run in placed]
    found, faults, hrefs = dict[str, Run](), dict[str, str](), dict[str, str]()
    for source, run_id in placed:
        name = run_id if names.count(run_id) == 1 else f"{source.label}: {run_id}"
        hrefs[name] = addresses.of_run(source.number, run_id)
        try:
            found[name] = source.run(run_id)
        except AtollError as error:  # it was deleted, and its folder with it
            faults[name] = " ".join(error.faults)
    document = side_by_side(found, metric, over or "round")
    document["left_out"] |= faults
    hidden = [("sweep", sweep)] if sweep else [("run", key) for key in chosen]
    return document, lambda: compare.compare(document, hrefs, hidden, sweep=title, num_left=num_left)


def _placed(sources: Mapping[int, Source], key: str) -> tuple[Source, str]:
    """Return the place and the name in a key, such as `1/digits-1`; raises AtollError."""
    place, _, name = key.partition("/")
    source = sources.get(int(place[:9])) if place.isascii() and place.isdecimal() else None
    if source is None:
        raise AtollError(f"{key[:80]!r} names no place (known: 1 to {len(sources)})")
    return source, name


def document_of(answer: Answer) -> Document:
    """Return the document of an answer.

    Raises:
        AtollError: the command ends with it.
    """
    if isinstance(answer[0], AtollError):
        raise answer[0]
    return answer[0]


def _without(source: Source, title: str, error: AtollError) -> Callable[[], Page]:
    """Return what makes a page of a place that has nothing to show there, as the sentences of the command say."""
    is_agent, lines = isinstance(source.place, Agent), [printable(fault) for fault in error.faults]
    tabs = (addresses.tabs_of_agent if is_agent else addresses.tabs_of_coordinator)(source.number)
    return lambda: Page(title, [Sentences("Why", lines)], addresses.trail(source.number, source.label), tabs)
