"""The pages at their addresses: each as HTML, as JSON at the same address with `.json`, and the stream of news."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import jinja2
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from atoll.dashboard.access import LINK_S, LOGIN, SESSION_S, Guard, Sessions
from atoll.dashboard.live import Live, Pictures
from atoll.dashboard.pages import addresses, rounds, run, runs, simulated, sites, versions
from atoll.dashboard.pages.blocks import Page, Sentences, fates_of
from atoll.dashboard.sources import Source
from atoll.ground.printable import printable
from atoll.interface.deployed import DeployedRun
from atoll.interface.errors import AtollError

HERE = Path(__file__).parent

LIVE = "/live"
"""The address of the stream of news."""

KEYS_MAX = 64
"""Largest number of runs that one stream may ask for."""

READERS = 4
"""Largest number of views that are read at one time."""

COUNT, COUNT_MAX = 100, 1_000
"""Rows of a page of a list: by default, and at most."""

POLICY_ROUNDS = 1_000
"""Number of the newest rounds over which the page of the policy counts."""

SITE_ROUNDS = 25
"""Number of the newest rounds on the page of a site."""

FATES_OF_SITE = 300
"""Number of the newest rounds in which the fates of a site are looked for."""

AWAY = 75
"""The code of an `AtollError` whose cause passes: a database or a coordinator is away."""

Document = Any
Answer = tuple[Document, Callable[[], Page]]
"""The document of `.json`, and the function that makes the page."""


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

    def only(self, *names: str) -> dict[str, str]:
        """Return some values of the query that are not empty."""
        return {name: self.query[name] for name in names if self.query.get(name)}

    @property
    def count(self) -> int:
        """The rows of a page.

        Raises:
            AtollError: it is no number, or too large.
        """
        text = self.query.get("count", str(COUNT))
        if not (text.isascii() and text.isdecimal()) or not 1 <= int(text[:9]) <= COUNT_MAX:
            raise AtollError(f"count: got {text!r}; allowed: 1 to {COUNT_MAX:,}")
        return int(text)


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
        document = here.document
        return versions.versions(source.number, source.label, document, seen.rows, seen.next, given)

    return seen.rows, make


def of_policy(asked: Asked) -> Answer:
    """Return what the policy of a run has decided."""
    source, here = asked.source, asked.source.deployed(asked.run)
    rows = here.page("rounds", count=POLICY_ROUNDS, last=True).rows
    return rows, lambda: rounds.policy(source.number, source.label, here.document, rows)


def of_members(asked: Asked) -> Answer:
    """Return the members of a coordinator."""
    source, rows = asked.source, list(asked.source.federation().members)
    given = asked.only("role", "standing", "text")
    return rows, lambda: runs.members(source.number, source.label, rows, **given)


PAGES: Sequence[tuple[str, Callable[[Asked], Answer]]] = (
    ("/runs/{place:int}/{run}/rounds/{number:int}", of_round),
    ("/runs/{place:int}/{run}/rounds", of_rounds),
    ("/runs/{place:int}/{run}/sites", of_sites),
    ("/runs/{place:int}/{run}/site", of_site),
    ("/runs/{place:int}/{run}/versions", of_versions),
    ("/runs/{place:int}/{run}/policy", of_policy),
    ("/members/{place:int}", of_members),
    ("/runs/{place:int}/{run}", of_run),
)
"""The addresses of the pages, and what is read for each."""


class Dashboard:
    """The pages of some places.

    Args:
        sources: the places.
        sessions: the sessions of the browsers.
        cookie: the name of their cookie.
        clock: returns the time [s since the epoch].
        is_live: whether pages change by themselves.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        sessions: Sessions,
        cookie: str,
        clock: Callable[[], float] = time.time,
        *,
        is_live: bool = True,
    ) -> None:
        self._live, self._pictures, self._is_live = Live(self._run), Pictures(), is_live
        self._sources = {source.number: source for source in sources}
        self._sessions, self._cookie, self._clock = sessions, cookie, clock
        self._limiter: anyio.CapacityLimiter | None = None
        self._templates = jinja2.Environment(
            loader=jinja2.FileSystemLoader(HERE / "templates"),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.globals["fates_of"] = fates_of

    def app(self, hosts: set[str]) -> Guard:
        """Return the application, which answers requests to these values of `Host` alone."""
        routes = [Route(LOGIN, self._login), Route("/", self._runs), Route("/runs.json", self._runs)]
        routes += [Route(LIVE, self._news)] if self._is_live else []
        for path, read in PAGES:
            routes += [Route(f"{path}.json", self._page(read)), Route(path, self._page(read))]
        app = Starlette(
            routes=[*routes, Mount("/static", StaticFiles(directory=HERE / "static"))],
            exception_handlers={HTTPException: self._not_found, AtollError: self._fault},
        )
        return Guard(app, self._sessions, hosts, self._clock, self._cookie)

    async def _read(self, call: Callable[[], Any]) -> Any:
        """Return the result of a call that reads, on a thread; at most `READERS` read at one time."""
        if self._limiter is None:
            self._limiter = anyio.CapacityLimiter(READERS)
        return await anyio.to_thread.run_sync(call, limiter=self._limiter)

    def _source(self, place: int) -> Source:
        if (source := self._sources.get(place)) is None:
            raise AtollError(f"there is no place {place} (known: 1 to {len(self._sources)})")
        return source

    def _run(self, key: str) -> DeployedRun:
        """Return the run of a key, such as `1/digits-1`; raises AtollError."""
        place, _, run_id = key.partition("/")
        return self._source(int(place) if place.isascii() and place.isdecimal() else 0).deployed(run_id)

    def _page(self, read: Callable[[Asked], Answer]) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            path = request.path_params
            source, run_id = self._source(path["place"]), addresses.name_in(path.get("run", ""))
            followed = self._live.of(addresses.key_of(source.number, run_id))
            lines = () if followed is None else tuple(followed.lines)
            asked = Asked(source, run_id, path, dict(request.query_params), lines)
            if request.url.path.endswith(".json"):
                found = await self._read(lambda: _json(read(asked)[0]))
                return Response(found, media_type="application/json")

            async def render() -> str:
                html: str = await self._read(lambda: self._html(read(asked)[1]()))
                return html

            if followed is None:
                return HTMLResponse(await render())
            return HTMLResponse(await self._pictures.picture(str(request.url), followed, render))

        return answer

    async def _news(self, request: Request) -> Response:
        keys = request.query_params.getlist("run")[:KEYS_MAX]
        headers = {"x-accel-buffering": "no"}
        return StreamingResponse(self._live.stream(keys), media_type="text/event-stream", headers=headers)

    async def _runs(self, request: Request) -> Response:
        query = request.query_params
        wanted = [one for one in self._sources.values() if query.get("place", str(one.number)) == str(one.number)]
        places = [await self._read(source.of_page) for source in wanted]
        if request.url.path.endswith(".json"):
            found = [{"place": place.label, "fault": place.fault, "runs": place.rows} for place in places]
            return Response(_json(found), media_type="application/json")
        page = runs.runs(places, state=query.get("state", ""), text=query.get("text", ""))
        return HTMLResponse(self._html(page))

    async def _login(self, request: Request) -> Response:
        cookie = self._sessions.opened_by(request.query_params.get("t", ""), self._clock())
        if cookie is None:
            why = f"this link was used, or is older than {LINK_S / 60:.0f} minutes"
            lines = [f"{why}: `atoll dashboard link` prints another one"]
            return HTMLResponse(self._html(Page("No session", [Sentences("Why", lines)])), 403)
        answer = HTMLResponse(self._templates.get_template("login.html").render())
        answer.set_cookie(self._cookie, cookie, max_age=int(SESSION_S), path="/", httponly=True, samesite="strict")
        return answer

    async def _not_found(self, request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 404
        lines = [f"there is no page {printable(request.url.path)[:200]}"]
        return HTMLResponse(self._html(Page("Not found", [Sentences("Why", lines)])), status)

    async def _fault(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, AtollError)
        status = 503 if error.code == AWAY else 404
        lines = [printable(fault) for fault in error.faults]
        if request.url.path.endswith(".json"):
            return Response(_json({"faults": lines}), status, media_type="application/json")
        return HTMLResponse(self._html(Page("Not shown", [Sentences("Why", lines)])), status)

    def _html(self, page: Page) -> str:
        return self._templates.get_template("page.html").render(page=page, is_live=self._is_live)


def _json(document: Any) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
