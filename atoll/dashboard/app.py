"""The pages at their addresses: each as HTML, as JSON at the same address with `.json`, and the stream of news."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import jinja2
from starlette.applications import Starlette
from starlette.convertors import IntegerConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from atoll.dashboard.access import LINK_S, LOGIN, SESSION_S, Door, Guard, LoopbackDoor, Refused
from atoll.dashboard.control import Control
from atoll.dashboard.live import Live, Pictures
from atoll.dashboard.pages import addresses, runs
from atoll.dashboard.pages.blocks import Page, Sentences, fates_of
from atoll.dashboard.readings import PAGES, Answer, Asked, compared, document_of
from atoll.dashboard.sources import Source
from atoll.ground.printable import printable
from atoll.interface.deployed import AWAY, DeployedRun
from atoll.interface.errors import AtollError
from atoll.interface.json_text import to_json

HERE = Path(__file__).parent

LIVE = "/live"
"""The address of the stream of news."""

KEYS_MAX = 64
"""Largest number of runs that one stream may ask for."""

READERS = 4
"""Largest number of views that are read at one time."""


class _Number(IntegerConvertor):
    """Number in an address, short enough that Python and SQLite can have it."""

    regex = "[0-9]{1,18}"


register_url_convertor("number", _Number())


class Dashboard:
    """The pages of some places.

    Args:
        sources: the places.
        is_live: whether pages change by themselves.
        is_controlled: whether there are forms that change runs and members.
    """

    def __init__(self, sources: Sequence[Source], *, is_live: bool = True, is_controlled: bool = False) -> None:
        self._live, self._pictures, self._is_live = Live(self._run), Pictures(), is_live
        self._sources = {source.number: source for source in sources}
        self._control = Control(self._source, self._html) if is_controlled else None
        self._limiter: anyio.CapacityLimiter | None = None
        self._templates = jinja2.Environment(
            loader=jinja2.FileSystemLoader(HERE / "templates"),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.globals["fates_of"] = fates_of
        self._templates.filters["printable"] = printable

    def app(self, door: Door) -> Guard:
        """Return the application, which answers requests that come through a door alone."""
        routes = [Route("/", self._runs), Route("/runs.json", self._runs)]
        routes += [Route("/compare", self._compare), Route("/compare.json", self._compare)]
        routes += [Route(LOGIN, self._login(door))] if isinstance(door, LoopbackDoor) else []
        routes += [Route(LIVE, self._news)] if self._is_live else []
        routes += self._control.routes() if self._control is not None else []
        for path, read in PAGES:
            routes += [Route(f"{path}.json", self._page(read)), Route(path, self._page(read))]
        app = Starlette(
            routes=[*routes, Mount("/static", StaticFiles(directory=HERE / "static"))],
            exception_handlers={HTTPException: self._not_found, AtollError: self._fault, Refused: self._refused},
        )
        return Guard(app, door, is_controlled=self._control is not None)

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
        known = {str(number): number for number in self._sources}  # one spelling, or a run has several followers
        return self._source(known.get(place, 0)).deployed(run_id)

    def _page(self, read: Callable[[Asked], Answer]) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            path = request.path_params
            source, run_id = self._source(path["place"]), addresses.name_in(path.get("run", ""))
            followed = self._live.of(addresses.key_of(source.number, run_id))
            lines = () if followed is None else tuple(followed.lines)
            token = self._control.token_of_site(source, request) if self._control is not None else ""
            asked = Asked(source, run_id, path, dict(request.query_params), lines, token)
            if request.url.path.endswith(".json"):
                found = await self._read(lambda: _json(document_of(read(asked))))
                return Response(found, media_type="application/json")

            async def render() -> str:
                html: str = await self._read(lambda: self._html(self._with_control(read(asked)[1](), asked)))
                return html

            if followed is None or token:  # a picture is for all visitors
                return HTMLResponse(await render())
            return HTMLResponse(await self._pictures.picture(str(request.url), followed, render))

        return answer

    def _with_control(self, page: Page, asked: Asked) -> Page:
        """Return a page of a coordinator with the link to its forms, as far as there are some."""
        source, run_id = asked.source, asked.run
        if self._control is None or not source.is_controlled:
            return page
        of_members = addresses.of_members(source.number, "control")
        address = addresses.of_run(source.number, run_id, "control") if run_id else of_members
        return replace(page, tabs=[*page.tabs, ("Control", address)])

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

    async def _compare(self, request: Request) -> Response:
        query = request.query_params
        only = {name: query.get(name, "") for name in ("sweep", "metric", "over")}
        answer = await self._read(lambda: compared(self._sources, query.getlist("run"), **only))
        if request.url.path.endswith(".json"):
            return Response(_json(document_of(answer)), media_type="application/json")
        return HTMLResponse(await self._read(lambda: self._html(answer[1]())))

    def _login(self, door: LoopbackDoor) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            if (cookie := door.opened_by(request.query_params.get("t", ""))) is None:
                why = f"this link was used, or is older than {LINK_S / 60:.0f} minutes"
                lines = [f"{why}: `atoll dashboard link` prints another one"]
                return HTMLResponse(self._html(Page("No session", [Sentences("Why", lines)])), 403)
            found = HTMLResponse(self._templates.get_template("login.html").render())
            found.set_cookie(door.cookie, cookie, max_age=int(SESSION_S), path="/", httponly=True, samesite="strict")
            return found

        return answer

    async def _not_found(self, request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 404
        path = printable(request.url.path)[:200]
        lines = [f"{path} is no page for {request.method}" if status == 405 else f"there is no page {path}"]
        return HTMLResponse(self._html(Page("Not found", [Sentences("Why", lines)])), status)

    async def _fault(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, AtollError)
        status = 503 if error.code == AWAY else 404
        lines = [printable(fault) for fault in error.faults]
        if request.url.path.endswith(".json"):
            return Response(_json({"faults": lines}), status, media_type="application/json")
        return HTMLResponse(self._html(Page("Not shown", [Sentences("Why", lines)])), status)

    async def _refused(self, request: Request, error: Exception) -> Response:
        return HTMLResponse(self._html(Page("Refused", [Sentences("Why", [str(error)])])), 403)

    def _html(self, page: Page) -> str:
        return self._templates.get_template("page.html").render(page=page, is_live=self._is_live)


def _json(document: Any) -> str:
    return to_json(document, indent=2, ensure_ascii=False) + "\n"
