"""Every route walked, without and with `--control`; and the forms at a real coordinator."""

import asyncio
import json
import re
import threading
from collections.abc import Callable, Iterator
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from starlette.routing import Mount, Route
from starlette.testclient import TestClient

from atoll.dashboard.access import LoopbackDoor, Sessions, new_key, new_token
from atoll.dashboard.app import Dashboard
from atoll.dashboard.control import REQUESTS, Control
from atoll.dashboard.sources import sources
from atoll.interface.deployed import connect
from atoll.interface.errors import AtollError
from atoll.operations import admin
from atoll.server.journal.holder import running_coordinator
from tests.cli.federation import Federation, federation, start_run, wait_for
from tests.cli.invoking import invoke, shown
from tests.dashboard.test_process import dashboard, exchanged, get
from tests.waiting import BOUND_S

HOST = "127.0.0.1:7080"
ORIGIN = {"origin": f"http://{HOST}"}
NOW = 1000.0
RUN, MEMBERS, SITE = "/runs/1/r/control", "/members/1/control", "/agents/1/control"
CHANGES = [
    *(f"{RUN}/{act}" for act in ("pause", "resume", "stop", "statistics")),
    *(f"{MEMBERS}/{act}" for act in ("invite", "revoke")),
    *(f"{SITE}/{act}" for act in ("approve", "reject")),
]
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE")


class Browser:
    """A browser of a dashboard whose process does not run."""

    def __init__(self, places: list[str], *, is_controlled: bool) -> None:
        key = new_key()
        self.dashboard = Dashboard(sources(places), is_controlled=is_controlled)
        door = LoopbackDoor(Sessions(key), {HOST}, lambda: NOW, "atoll-7080")
        self.link = f"/login?t={new_token(key, NOW)}"
        self.app = self.dashboard.app(door)
        self.client = TestClient(self.app, base_url=f"http://{HOST}")
        self.stranger = TestClient(self.app, base_url=f"http://{HOST}")
        assert self.client.get(self.link).status_code == 200

    @property
    def addresses(self) -> dict[str, set[str]]:
        """An address of each route, with its methods."""
        found: dict[str, set[str]] = {}
        for route in self.app._app.routes:  # type: ignore[attr-defined]
            if isinstance(route, Mount):
                found[f"{route.path}/atoll.css"] = {"GET", "HEAD"}
                continue
            assert isinstance(route, Route)
            path = re.sub(r"\{\w+(:number)?\}", lambda match: "1" if match[1] else "r", route.path)
            found.setdefault(path, set()).update(route.methods or ())
        return found

    def token(self, page: str) -> str:
        """The token of the forms of a page."""
        (token, *others) = set(re.findall(r'name="token" value="(\w+)"', self.client.get(page).text))
        assert not others
        return str(token)


@pytest.fixture(scope="module")
def reading(places: list[str]) -> Browser:
    return Browser(places, is_controlled=False)


@pytest.fixture(scope="module")
def controlling(places: list[str]) -> Iterator[Browser]:
    patch = pytest.MonkeyPatch()
    patch.setattr(admin, "STARTING_S", 0.0)  # no coordinator holds these directories
    yield Browser(places, is_controlled=True)
    patch.undo()


def test_without_control_every_route_is_read_only(reading: Browser) -> None:
    found = reading.addresses
    assert len(found) > 15
    assert not [path for path in found if "control" in path]
    for path, methods in found.items():
        assert methods == {"GET", "HEAD"}, path
        for method in METHODS[2:]:
            assert reading.client.request(method, path, headers=ORIGIN).status_code == 403, (method, path)
    for path in CHANGES:
        assert reading.client.post(path, headers=ORIGIN).status_code == 403
        assert reading.client.get(path).status_code == 404


def test_with_control_the_changes_alone_take_post(controlling: Browser) -> None:
    found = controlling.addresses
    assert {path for path, methods in found.items() if "POST" in methods} == set(CHANGES)
    for path in found:
        if path in ("/live", "/login"):
            continue
        for method in METHODS[3:]:
            assert controlling.client.request(method, path, headers=ORIGIN).status_code == 403, (method, path)
        if path not in CHANGES:
            assert controlling.client.post(path, headers=ORIGIN).status_code == 405, path
    for path in CHANGES:
        assert controlling.client.get(path).status_code in (404, 405), path


@pytest.mark.parametrize("path", CHANGES)
def test_a_change_needs_session_host_origin_and_token(controlling: Browser, path: str) -> None:
    token = controlling.token(RUN if path.startswith(RUN) else MEMBERS)
    given = {"token": token, "typed": "r", "deadline": "1", "name": "north", "role": "client", "hours": "1"}
    client, stranger = controlling.client, controlling.stranger

    def status(browser: TestClient = client, given: dict[str, str] = given, **headers: str) -> int:
        return int(browser.post(path, data=given, headers=ORIGIN | headers).status_code)

    assert status() == 400, "the form is taken, and no coordinator runs"
    assert "Not done" in client.post(path, data=given, headers=ORIGIN).text
    assert status(stranger) == 403
    assert status(host="evil.example:7080") == 403
    for origin in ("http://evil.example", "null", "http://localhost:7080", f"https://{HOST}", "http://127.0.0.1:7081"):
        assert status(origin=origin) == 403, origin
    assert client.post(path, data=given).status_code == 403, "without an Origin"
    for wrong in ("", "0" * 64, token[:-1], token + "0"):
        assert status(given=given | {"token": wrong}) == 403, wrong
    assert client.post(path, json=given, headers=ORIGIN).status_code == 403
    plain = ORIGIN | {"content-type": "text/plain"}
    assert client.post(path, content=f"token={token}", headers=plain).status_code == 403
    form = ORIGIN | {"content-type": "application/x-www-form-urlencoded"}
    for body in (b"", b"token", b"x" * 20_000, b"token=%ff", b"&".join(b"a=1" for _ in range(99))):
        assert client.post(path, content=body, headers=form).status_code == 403, body[:20]


def test_a_token_of_another_session_is_refused(controlling: Browser, places: list[str]) -> None:
    other = Browser(places, is_controlled=True)
    answer = controlling.client.post(f"{RUN}/pause", data={"token": other.token(RUN)}, headers=ORIGIN)
    assert answer.status_code == 403
    assert "of another session" in answer.text


def test_a_used_link_opens_nothing(controlling: Browser) -> None:
    answer = controlling.stranger.get(controlling.link)
    assert answer.status_code == 403
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize(
    ("path", "given", "why"),
    [
        (f"{RUN}/stop", {"typed": "another"}, "nothing is stopped"),
        (f"{RUN}/stop", {}, "nothing is stopped"),
        (f"{MEMBERS}/revoke?role=client&name=a", {"typed": "b"}, "nothing is revoked"),
        (f"{MEMBERS}/revoke?role=pope&name=a", {"typed": "a"}, "role: got"),
        (f"{MEMBERS}/invite", {"name": "a b", "role": "client", "hours": "1"}, "allowed are 1 to 64 letters"),
        (f"{MEMBERS}/invite", {"name": "a", "role": "client", "hours": "nan"}, "hours: got"),
        (f"{MEMBERS}/invite", {"name": "a", "role": "client", "hours": "721"}, "hours: got"),
        (f"{MEMBERS}/invite", {"name": "a", "role": "authority", "hours": "1"}, "neither invited"),
        (f"{RUN}/statistics", {"deadline": "1e9"}, "deadline: got"),
        (f"{RUN}/pause", {"reason": "<script>\u202e\0"}, "no coordinator holds"),
        (
            f"{SITE}/approve",
            {"terms": "a", "standing": "undecided"},
            "is a coordinator: an agent's state directory alone",
        ),
        ("/agents/4/control/approve?run=r-1", {"standing": "undecided"}, "terms: got none"),
        ("/agents/4/control/reject?run=r-1", {}, "standing: got none"),
        ("/agents/4/control/reject?run=r-1", {"standing": "odd"}, "seen: got"),
        ("/agents/4/control/reject?run=r-9", {"standing": "undecided"}, "has not asked here"),
        ("/agents/4/control/reject?run=%00%3Cb%3E", {"standing": "undecided"}, "has not asked here"),
        ("/agents/4/control/reject", {"standing": "undecided"}, "has not asked here"),
        ("/runs/3/one/control/pause", {}, "is a folder of simulations"),
        ("/members/3/control/invite", {"name": "a", "role": "client", "hours": "1"}, "is a folder of simulations"),
    ],
)
def test_what_cannot_be_done_has_a_sentence(controlling: Browser, path: str, given: dict[str, str], why: str) -> None:
    page = MEMBERS if "members" in path else RUN
    answer = controlling.client.post(path, data=given | {"token": controlling.token(page)}, headers=ORIGIN)
    assert answer.status_code == 400
    assert why in unescape(answer.text)
    assert "<script>" not in answer.text


def test_pages_of_a_coordinator_lead_to_its_forms(controlling: Browser, reading: Browser) -> None:
    for page, forms in (("/runs/1/r", RUN), ("/members/1", MEMBERS)):
        assert f'href="{forms}"' in controlling.client.get(page).text
        assert f'href="{forms}"' not in reading.client.get(page).text
    assert "control" not in controlling.client.get("/runs/3/one").text
    assert controlling.client.get("/runs/3/one/control").status_code == 404
    assert controlling.client.get("/runs/1/none/control").status_code == 404
    assert controlling.client.get(f"{MEMBERS}/revoke?role=client&name=%3Cb%3E").status_code == 404
    assert "/agents/4/control" in controlling.client.get("/agents/4").text
    assert "control" not in reading.client.get("/agents/4").text
    assert controlling.client.get("/agents/4/control?run=r-9").status_code == 404
    assert controlling.client.get("/agents/1/control?run=r").status_code == 404


def test_a_stop_does_not_wait_for_sites_that_are_asked() -> None:
    control, begun, may_end = Control(lambda _: pytest.fail("no place"), lambda _: ""), list[int](), threading.Event()

    def ask() -> str:
        begun.append(1)
        assert may_end.wait(BOUND_S)
        return "asked"

    async def scene() -> None:
        asked = [asyncio.create_task(control._off_loop(ask, REQUESTS)) for _ in range(4)]
        while len(begun) < REQUESTS:
            await asyncio.sleep(0)
        assert await control._off_loop(lambda: "stopped") == "stopped"
        assert (len(begun), [one.done() for one in asked]) == (REQUESTS, [False] * 4)
        may_end.set()
        await asyncio.gather(*asked)

    asyncio.run(asyncio.wait_for(scene(), BOUND_S))


class Labels(HTMLParser):
    """The inputs of a page, and the labels that name them."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: set[str] = set()
        self.labels: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("input", "select") and given.get("type") != "hidden":
            self.inputs.add(given["id"] or "")
        if tag == "label":
            self.labels.add(given["for"] or "")


@pytest.mark.parametrize("page", [RUN, MEMBERS, "/agents/4", "/agents/4/control?run=r-1"])
def test_every_input_has_a_label_and_no_form_is_kept_or_needs_a_script(controlling: Browser, page: str) -> None:
    answer = controlling.client.get(page)
    assert answer.headers["cache-control"] == "no-store"
    found = Labels()
    found.feed(answer.text)
    assert found.inputs or "control?run" in page
    assert found.inputs == found.labels
    assert "<script" not in re.sub(r'<script src="/static/\w+(\.min)?\.js"', "", answer.text)
    assert answer.headers["referrer-policy"] == "same-origin", "else a browser sends the Origin `null` with a form"


def change_members(it: Federation, link: str, cookie: str, sent: Callable[..., tuple[int, str]]) -> str:
    """Invite and revoke a member by the forms, and return the join code."""
    of_members = "/members/1/control"
    status, page = sent(f"{of_members}/invite", name="olga", role="auditor", hours="1")
    assert status == 200
    (code,) = re.findall(r"<bdi>([\w.:-]{60,})</bdi>", page)
    for other in (of_members, "/members/1"):
        assert code not in get(link, other, cookie)[2], "it is shown once"
    joined = invoke("join", code, "--identity", it.folder / "olga", "--json")
    assert json.loads(joined.stdout)["role"] == "auditor"
    revoke = f"{of_members}/revoke?role=auditor&name=olga"
    assert "type olga" in get(link, revoke, cookie)[2]
    assert sent(revoke, typed="boris")[0] == 400
    assert sent(revoke, typed="olga")[0] == 200
    members = {row["name"]: row["standing"] for row in shown("client", "members", "--state", it.state)}
    assert members["olga"] == "revoked"
    return code


def act_for_users(it: Federation) -> None:
    """Change members for users of a proxy, as an owner and as an auditor, who may not."""
    here = connect(it.state)
    invoke("join", here.invite("boris", role="auditor"), "--identity", it.folder / "boris")
    here.acting_for("ann\u202e<b>" + "x" * 100).invite("zoe")
    running = running_coordinator(it.state)
    assert running is not None
    auditor = connect(running.admin_address, credential=it.folder / "boris").acting_for("root")
    with pytest.raises(AtollError, match="auditor"):
        auditor.invite("mallory")


@pytest.mark.real
def test_forms_change_a_real_federation_as_its_owner(tmp_path: Path) -> None:
    with federation(tmp_path) as it, dashboard(str(it.state), "--control", home=tmp_path) as (process, link):
        run = start_run(it, "steered", "rounds=1000", "pause=0.2", "round.min_available=2")["run"]
        cookie = get(link, link.partition(urlsplit(link).netloc)[2])[1]
        of_run = f"/runs/1/{run}/control"
        token = re.findall(r'name="token" value="(\w+)"', get(link, of_run, cookie)[2])[0]

        def sent(path: str, **given: str) -> tuple[int, str]:
            status, page = exchanged(link, path, cookie, given | {"token": token})
            seen = re.findall(r'<a href="([^"]+)">The ', unescape(page))
            assert bool(seen) == (status == 200), page
            assert [get(link, address, cookie)[0] for address in seen] == [200] * len(seen), seen
            return status, page

        status, page = sent(f"{of_run}/pause", reason="to look")
        assert (status, f"{run} is " in page) == (200, True), page
        wait_for(lambda: it.run_state(run) == "paused")
        assert sent(f"{of_run}/resume")[0] == 200
        wait_for(lambda: it.run_state(run) == "running")
        status, page = sent(f"{of_run}/statistics", deadline="60")
        assert (status, "2 of 2 sites answered" in page) == (200, True), page
        assert 'href="/statistics/1?number=1"' in page
        assert sent(f"{of_run}/stop", typed="steered")[0] == 400
        assert it.run_state(run) == "running"
        status, page = sent(f"{of_run}/stop", typed=run, reason="seen enough")
        assert (status, f"{run} is " in page) == (200, True), page
        wait_for(lambda: it.run_state(run) == "stopped")
        assert shown("run", "show", run, "--state", it.state)["cause"] == "seen enough"
        code = change_members(it, link, cookie, sent)
        act_for_users(it)

        process.terminate()
        out, err = process.communicate(timeout=BOUND_S)
        log = it.log("coordinator")
        assert not [text for text in (out, err, log) if code in text or token in text], "a secret is in a log"
        events = shown("audit", "show", "--last", "500", "--state", it.state)["events"]
        actors = {event["action"]: (event["actor"], event["role"]) for event in events}
        for action in ("run.pause", "run.resume", "run.stop", "client.invite", "client.revoke", "statistics.collect"):
            assert actors[action][1] == "owner", (action, actors[action])
        users = {(one["action"], one["role"], one["on_behalf_of"]) for one in events if "on_behalf_of" in one}
        ann = ("ann\\u202e<b>" + "x" * 100)[:77] + "..."
        assert users == {("client.invite", "owner", ann), ("call", "owner", ann), ("call", "auditor", "root")}
        table = invoke("audit", "show", "--last", "500", "--actor", "root", "--state", it.state).stdout
        assert "boris for root" in table, "the user is named, and has no rights"
