"""The changes that `--control` allows: of runs, members and a site's decisions, through the calls of the commands."""

import json
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from urllib.parse import parse_qs

import anyio
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from atoll.dashboard.access import VISITOR, Forms, Refused, Visitor
from atoll.dashboard.pages import addresses, agents
from atoll.dashboard.pages import control as pages
from atoll.dashboard.pages.blocks import Page, Sentences
from atoll.dashboard.sources import Source
from atoll.ground.printable import count_of, printable
from atoll.interface.deployed import Federation
from atoll.interface.errors import AtollError
from atoll.interface.roles import check_role

logger = logging.getLogger(__name__)

CHANGES, REQUESTS = 4, 2
"""Largest numbers of changes, and of requests for statistics, at one time: no stop waits for sites."""

BODY_BYTES_MAX = 16 * 1024
"""Largest size of what a form sends."""

CLIENT = "client"
"""The role of the members that each role which may change some may change."""

OWNER = "owner"
"""The role of a proxy's users that decides for a site, as its data are no operator's."""

FORM = "application/x-www-form-urlencoded"


@dataclass(frozen=True)
class Sent:
    """What a form has sent.

    Args:
        source: the place.
        run: the run in it; empty: the form is of members.
        values: the values of its fields.
        query: the values in its address.
        by: the user of a proxy who has sent it; empty: the owner of this process.
        is_of_site: whether the form is of a site.
    """

    source: Source
    run: str
    values: Mapping[str, str]
    query: Mapping[str, str] = field(default_factory=dict)
    by: str = ""
    is_of_site: bool = False

    @property
    def controlled(self) -> Federation:
        """The coordinator to be changed, for the user of a proxy; raises AtollError."""
        return self.source.controlled(self.by)

    @property
    def reason(self) -> str:
        """The reason for the run's record, with the user of a proxy."""
        said = self.values.get("reason", "")
        return ": ".join(part for part in (self.by and f"by {self.by}", said) if part)

    @property
    def role(self) -> str:
        """The role of the member in the address or, where it names none, in the form."""
        return self.query.get("role") or self.values.get("role", "")

    @property
    def name(self) -> str:
        """The name of that member."""
        return (self.query.get("name") or self.values.get("name", "")).strip()

    @property
    def number(self) -> int:
        """The number of the place."""
        return self.source.number

    @property
    def label(self) -> str:
        """The name of the place."""
        return self.source.label

    @property
    def asked(self) -> str:
        """The run that has asked a site, in the address."""
        return self.query.get("run", "")

    @property
    def above(self) -> list[tuple[str, str]]:
        """The pages above the page of the change."""
        if self.is_of_site:
            return agents.trail(self.number, self.label)
        if self.run:
            control = ("Control", addresses.of_run(self.number, self.run, "control"))
            return [*addresses.trail(self.number, self.label, self.run), control]
        return pages.trail_of_members(self.number, self.label)

    @property
    def seen(self) -> list[tuple[str, str]]:
        """The pages on which the change of a run is seen."""
        return [("The run", addresses.of_run(self.number, self.run)), *self.logged("run")]

    def logged(self, action: str) -> list[tuple[str, str]]:
        """Return the page of the log that has the change, among some actions."""
        page = "decisions" if self.is_of_site else "audit"
        return [("The log", addresses.of_place(self.number, page, action=action))]

    def check_typed(self, name: str, what: str) -> None:
        """Check that a name was typed; raises AtollError."""
        if self.values.get("typed", "").strip() != name:
            got = self.values.get("typed", "")
            raise AtollError(f"name: got {got!r}; allowed: {name}, which was not typed, so {what}")

    def shown(self, name: str) -> str:
        """Return a value that the form has shown, and sends back; raises AtollError."""
        if not (found := self.values.get(name, "")):
            raise AtollError(f"{name}: got none; allowed: what the page has shown: load it again")
        return found

    def value(self, name: str, least: float, most: float) -> float:
        """Return a number within bounds; raises AtollError."""
        text = self.values.get(name, "")
        try:
            found = float(text)
        except ValueError:
            found = math.nan
        if not least <= found <= most:
            raise AtollError(f"{name}: got {text!r}; allowed: {least:g} to {most:g}")
        return found


def pause(sent: Sent) -> Page:
    """Pause a run."""
    return pages.done(sent.controlled.known_run(sent.run).pause(sent.reason), sent.above, sent.seen)


def resume(sent: Sent) -> Page:
    """Continue a run."""
    return pages.done(sent.controlled.known_run(sent.run).resume(), sent.above, sent.seen)


def stop(sent: Sent) -> Page:
    """Stop a run, whose name was typed."""
    sent.check_typed(sent.run, "nothing is stopped")
    return pages.done(sent.controlled.known_run(sent.run).stop(sent.reason), sent.above, sent.seen)


def statistics(sent: Sent) -> Page:
    """Ask the connected sites of a run for statistics, and show them."""
    deadline = sent.value("deadline", 0.1, pages.DEADLINE_MAX)
    found = sent.controlled.known_run(sent.run).statistics(deadline=deadline)
    number, asked = found["number"], count_of(len(found["asked"]), "site")
    again = f"`atoll run statistics --show {number}` prints them"
    seen = ("The statistics", addresses.of_place(sent.number, "statistics", number=number))
    document = json.dumps(found, indent=2, ensure_ascii=False)
    sentence = f"statistics {number}: {len(found['answered'])} of {asked} answered; {again}"
    return pages.done(sentence, sent.above, [seen, *sent.logged("statistics")], document=document)


def invite(sent: Sent) -> Page:
    """Make a join code, which nothing but the answer has."""
    name, role = sent.name, sent.role
    hours = sent.value("hours", 0.001, 720)
    code = sent.controlled.invite(name, role=role, hours=hours)
    sentence = f"{role} {name} is invited, for {count_of(hours, 'hour')}; the join code is shown once"
    return pages.done(sentence, sent.above, [_member(sent), *sent.logged("client.invite")], code=code)


def revoke(sent: Sent) -> Page:
    """Revoke a member, whose name was typed."""
    name, role = sent.name, sent.role
    sent.check_typed(name, "nothing is revoked")
    sent.controlled.revoke(name, role=role)
    return pages.done(f"{role} {name} is revoked", sent.above, [_member(sent), *sent.logged("client.revoke")])


def _member(sent: Sent) -> tuple[str, str]:
    return "The member", addresses.of_members(sent.number, role=sent.role, text=sent.name)


def approve(sent: Sent) -> Page:
    """Approve a run that has asked a site, on the terms that the form has shown."""
    given = {"terms": sent.shown("terms"), "seen": sent.shown("standing")}
    return pages.done(sent.source.agent().approve(sent.asked, by=sent.by, **given), sent.above, _decided(sent))


def reject(sent: Sent) -> Page:
    """Reject a run that has asked a site, whatever it asks for meanwhile: other terms keep no one from rejecting it."""
    seen = sent.shown("standing")
    return pages.done(sent.source.agent().reject(sent.asked, seen=seen, by=sent.by), sent.above, _decided(sent))


def _decided(sent: Sent) -> list[tuple[str, str]]:
    return [("The request", addresses.of_place(sent.number, "agents", text=sent.asked)), *sent.logged("site")]


Act = tuple[Callable[[Sent], Page], str]
"""A change, and the method of the Admin service that it calls; empty: it is a site's decision."""

OF_RUNS: Mapping[str, Act] = {
    "pause": (pause, "PauseRun"),
    "resume": (resume, "ResumeRun"),
    "stop": (stop, "StopRun"),
    "statistics": (statistics, "CollectStatistics"),
}
OF_MEMBERS: Mapping[str, Act] = {"invite": (invite, "Invite"), "revoke": (revoke, "Revoke")}
OF_SITE: Mapping[str, Act] = {"approve": (approve, ""), "reject": (reject, "")}
"""The changes by the ends of their addresses."""

RUN, MEMBERS = "/runs/{place:number}/{run}/control", "/members/{place:number}/control"
SITE = "/agents/{place:number}/control"


class Control:
    """The forms, and what they change.

    Args:
        source: returns the place of a number.
        html: renders a page.
    """

    def __init__(self, source: Callable[[int], Source], html: Callable[[Page], str]) -> None:
        self._source, self._html, self._forms = source, html, Forms()
        self._limiters: dict[int, anyio.CapacityLimiter] = {}

    def routes(self) -> list[Route]:
        """Return the addresses: forms by GET, changes by POST."""
        changes = ((RUN, OF_RUNS), (MEMBERS, OF_MEMBERS), (SITE, OF_SITE))
        return [
            Route(RUN, self._page(self._of_run, "PauseRun")),
            Route(MEMBERS, self._page(self._of_members, "Invite")),
            Route(f"{MEMBERS}/revoke", self._page(self._of_revocation, "Revoke")),
            Route(SITE, self._page(self._of_request, "")),
            *(
                Route(f"{path}/{name}", self._change(name, *act), methods=["POST"])
                for path, acts in changes
                for name, act in acts.items()
            ),
        ]

    def token_of_site(self, source: Source, request: Request) -> str:
        """Return the token of the forms on a site's page; empty: there are none for this visitor."""
        visitor = _visitor(request)
        return self._forms.token(visitor) if source.is_agent and visitor.role in ("", OWNER) else ""

    def _of_run(self, sent: Sent, token: str) -> Page:
        return pages.of_run(sent.number, sent.label, sent.source.controlled().known_run(sent.run).facts, token)

    def _of_members(self, sent: Sent, token: str) -> Page:
        sent.source.controlled()
        return pages.of_members(sent.number, sent.label, token)

    def _of_revocation(self, sent: Sent, token: str) -> Page:
        name, role = sent.name, sent.role
        for member in sent.source.controlled().members:
            if (member["role"], member["name"]) == (role, name):
                return pages.of_revocation(sent.number, sent.label, member, token)
        raise AtollError(f"no {role} {name!r} was invited or enrolled here: the page of the members has all")

    def _of_request(self, sent: Sent, token: str) -> Page:
        return agents.request(sent.number, sent.label, sent.source.agent().request(sent.asked), token)

    def _page(self, page: Callable[[Sent, str], Page], method: str) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            _check_role(_visitor(request), method, CLIENT)
            sent, token = self._sent(request, {}), self._forms.token(_visitor(request))
            return HTMLResponse(await self._off_loop(lambda: self._html(page(sent, token))))

        return answer

    def _change(self, name: str, act: Callable[[Sent], Page], method: str) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            values, visitor = await _values(request), _visitor(request)
            self._forms.check(visitor, values.pop("token", ""))
            sent = replace(self._sent(request, values), by=visitor.name)
            try:
                _check_role(visitor, method, sent.role)
                most = REQUESTS if act is statistics else CHANGES
                page = await self._off_loop(lambda: self._html(act(sent)), most)
            except (AtollError, Refused) as error:
                logger.info("%s: %s of %s is refused", _named(visitor), name, _object_of(sent))
                if isinstance(error, Refused):
                    raise
                lines = [printable(fault) for fault in error.faults]
                return HTMLResponse(self._html(Page("Not done", [Sentences("Why", lines)], sent.above)), 400)
            logger.info("%s: %s of %s", _named(visitor), name, _object_of(sent))
            return HTMLResponse(page)

        return answer

    def _sent(self, request: Request, values: Mapping[str, str]) -> Sent:
        path = request.path_params
        run = addresses.name_in(path.get("run", ""))
        is_of_site = request.url.path.startswith("/agents/")
        return Sent(self._source(path["place"]), run, values, dict(request.query_params), is_of_site=is_of_site)

    async def _off_loop(self, call: Callable[[], str], most: int = CHANGES) -> str:
        if most not in self._limiters:
            self._limiters[most] = anyio.CapacityLimiter(most)
        return await anyio.to_thread.run_sync(call, limiter=self._limiters[most])


def _check_role(visitor: Visitor, method: str, of: str) -> None:
    """Check that a user's role may make a change: the coordinator knows the role of the process's credential alone.

    Raises:
        Refused: it may not, by the rules of the coordinator; or it decides for no site.
    """
    if not method and visitor.role not in ("", OWNER):
        raise Refused(f"the role {visitor.role} may not do this: for a site decides the role {OWNER}")
    if method and visitor.role:
        try:
            check_role(visitor.role, method, of)
        except AtollError as error:
            raise Refused(str(error)) from None


def _named(visitor: Visitor) -> str:
    return f"{printable(visitor.name)} ({visitor.role})" if visitor.name else "the owner of this process"


def _object_of(sent: Sent) -> str:
    what = f"run {sent.asked} at {sent.label}" if sent.is_of_site else f"{sent.role} {sent.name}"
    return printable(sent.run or what)[:200]


def _visitor(request: Request) -> Visitor:
    visitor = request.scope[VISITOR]
    assert isinstance(visitor, Visitor)
    return visitor


async def _values(request: Request) -> dict[str, str]:
    """Return the values of the fields of a form; raises Refused."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != FORM:
        raise Refused(f"a form is sent as {FORM}")
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > BODY_BYTES_MAX:
            raise Refused(f"a form has at most {BODY_BYTES_MAX} bytes")
    try:
        found = parse_qs(body.decode(), keep_blank_values=True, strict_parsing=True, errors="strict", max_num_fields=16)
    except ValueError as error:
        raise Refused("what was sent is no form") from error
    return {name: values[-1] for name, values in found.items()}
