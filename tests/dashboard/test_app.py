"""Every page at its address: whole without scripts, JSON beside it, and closed to all who have no session."""

import json
import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from atoll.dashboard.access import HEADERS, LoopbackDoor, Sessions, new_key, new_token
from atoll.dashboard.app import Dashboard
from atoll.dashboard.readings import PAGES
from atoll.dashboard.sources import sources
from atoll.interface.errors import AtollError
from atoll.protocol.paging import Paging
from atoll.server.views.history import History
from atoll.server.views.views import View, look
from tests.cli.federation import wait_for
from tests.cli.invoking import shown
from tests.dashboard.conftest import HOSTILE

HOST = "127.0.0.1:7080"
DEPLOYED = "/runs/1/r"
WALKED = [
    "/",
    "/?place=2&state=finished&text=MANY",
    DEPLOYED,
    f"{DEPLOYED}/rounds",
    f"{DEPLOYED}/rounds?state=committed&count=1",
    f"{DEPLOYED}/rounds/1",
    f"{DEPLOYED}/rounds/4",
    f"{DEPLOYED}/sites",
    f"{DEPLOYED}/sites?prefix=a&count=1",
    f"{DEPLOYED}/site?name=c",
    f"{DEPLOYED}/site?name=%3Cscript%3E%E2%80%AE%00",
    f"{DEPLOYED}/versions",
    f"{DEPLOYED}/versions?count=1&after=2",
    f"{DEPLOYED}/policy",
    f"{DEPLOYED}/privacy",
    "/members/1",
    "/members/2?role=client&text=x",
    "/statistics/1",
    "/statistics/1?number=1",
    "/audit/1",
    "/audit/1?count=20&before=200&action=run",
    "/alerts/1",
    "/alerts/2",
    "/alerts/4",
    "/agents/4",
    "/agents/4?standing=undecided&text=t",
    "/decisions/4",
    "/decisions/4?action=train&count=1",
    "/budgets/4",
    "/peers/4",
    "/runs/3/one",
    "/runs/3/one/rounds",
    "/runs/3/one/rounds/2",
    "/runs/3/sweep~1a%3Cb&c",
    "/compare?run=1/r&run=3/one",
    "/compare?run=1/r&run=2/many-1&run=3/one&over=seconds",
    "/compare?run=3/one&run=3/sweep/torn&run=1/deleted&run=3/gone&metric=train/loss&over=bytes",
    "/compare?sweep=3/sweep",
]
"""An address of each kind of page."""


def door(key: bytes) -> LoopbackDoor:
    return LoopbackDoor(Sessions(key), {HOST}, lambda: 1000.0, "atoll-7080")


@pytest.fixture(scope="module")
def key() -> bytes:
    return new_key()


@pytest.fixture(scope="module")
def stranger(places: list[str], key: bytes) -> TestClient:
    """A browser without a session."""
    app = Dashboard(sources(places)).app(door(key))
    return TestClient(app, base_url=f"http://{HOST}", raise_server_exceptions=True)


@pytest.fixture(scope="module")
def browser(stranger: TestClient, key: bytes) -> TestClient:
    found = TestClient(stranger.app, base_url=f"http://{HOST}")
    answer = found.get("/login", params={"t": new_token(key, 999.0)})
    assert answer.status_code == 200
    cookie = answer.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=strict", "Path=/", "Max-Age=43200"} <= set(cookie.split("; "))
    return found


class Checked(HTMLParser):
    """What a page has: its texts, its links, and what a strict policy forbids."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.forbidden: list[str] = []
        self.ids: list[str] = []
        self.heads = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.forbidden += [f"{tag} {name}" for name in given if name == "style" or name.startswith("on")]
        if tag == "style" or (tag == "script" and "src" not in given):
            self.forbidden.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.heads += tag == "h1"


def test_every_route_is_walked() -> None:
    patterns = [re.sub(r"\{\w+(:number)?\}", lambda m: r"\d+" if m[1] else "[^/]+", path) for path, _ in PAGES]
    paths = [address.partition("?")[0] for address in WALKED]
    assert all(any(re.fullmatch(pattern, path) for path in paths) for pattern in patterns)


@pytest.mark.parametrize("address", WALKED)
def test_a_page_is_whole_without_scripts_and_has_nothing_from_outside(browser: TestClient, address: str) -> None:
    answer = browser.get(address)
    assert answer.status_code == 200, answer.text
    assert answer.headers.items() >= HEADERS.items()
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    page = Checked()
    page.feed(answer.text)
    assert page.forbidden == []
    assert page.heads == 1
    assert len(page.ids) == len(set(page.ids))
    assert all(link.startswith(("/", "#")) and not link.startswith("//") for link in page.links), page.links
    assert "\u202e" not in answer.text
    assert "\0" not in answer.text
    assert "alert(1)</script>" not in answer.text
    assert len(answer.content) < 1_000_000


@pytest.mark.parametrize("address", WALKED)
def test_its_json_is_at_the_same_address(browser: TestClient, address: str) -> None:
    path, mark, query = address.partition("?")
    answer = browser.get((path.rstrip("/") or "/runs") + ".json" + mark + query)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    json.loads(answer.content, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_the_links_of_a_page_lead_to_pages(browser: TestClient) -> None:
    seen = {"/"}
    ahead = ["/", DEPLOYED, "/runs/3/one", "/agents/4", f"{DEPLOYED}/rounds/2"]
    for address in ahead[:5]:
        page = Checked()
        page.feed(browser.get(address).text)
        ahead += [link for link in dict.fromkeys(page.links) if link.startswith("/") and link not in seen]
        seen.update(page.links)
    answers = {link: browser.get(link).status_code for link in dict.fromkeys(ahead)}
    assert {link for link, status in answers.items() if status != 200} <= {"/runs/3/sweep~1torn"}
    assert len(answers) > 20


def test_the_documents_are_the_views_of_the_commands(browser: TestClient, places: list[str]) -> None:
    history = History(sources(places)[0].federation()._state)
    document = look(history, View.RUN, "r")["document"]
    assert browser.get(f"{DEPLOYED}.json").json() == document
    assert browser.get(f"{DEPLOYED}/rounds.json").json() == look(history, View.ROUNDS, "r")["rows"]
    assert browser.get(f"{DEPLOYED}/rounds/2.json").json() == look(history, View.ROUND, "r", 2)
    assert browser.get(f"{DEPLOYED}/versions.json").json() == look(history, View.VERSIONS, "r")["rows"]
    assert browser.get(f"{DEPLOYED}/sites.json").json() == look(history, View.CLIENTS, "r")["rows"]
    (first,) = look(history, View.CLIENTS, "r", paging=Paging(1))["rows"]
    assert browser.get(f"{DEPLOYED}/site.json", params={"name": first["client"]}).json() == first


def test_the_documents_of_a_coordinator_are_those_of_its_commands(browser: TestClient, places: list[str]) -> None:
    state = places[0]
    assert browser.get("/statistics/1.json").json() == shown("run", "statistics", "--show", 0, "--state", state)
    assert browser.get("/statistics/1.json?number=1").json()["number"] == 1
    asked = ("audit", "show", "--last", 20, "--before", 200, "--action", "run", "--state", state)
    assert browser.get("/audit/1.json?count=20&before=200&action=run").json() == shown(*asked)
    assert browser.get("/alerts/1.json").json() == look(History(Path(state)), View.ALERTS)
    assert browser.get(f"{DEPLOYED}/privacy.json").json() is None
    for address, why in (("statistics", "no statistics were requested yet"), ("audit", "holds no audit log")):
        answer = browser.get(f"/{address}/2.json")
        assert answer.status_code == 404
        assert why in answer.json()["faults"][0]
        page = browser.get(f"/{address}/2")
        assert page.status_code == 200
        assert why in page.text


def test_the_documents_of_a_site_are_those_of_its_commands(browser: TestClient, places: list[str]) -> None:
    state = Path(places[3])
    assert browser.get("/agents/4.json").json() == shown("site", "list", "--state", state)
    assert browser.get("/budgets/4.json").json() == shown("site", "budgets", "--state", state)
    assert browser.get("/peers/4.json").json() == shown("site", "peers", "--state", state)
    files = sorted((state / "decisions").glob("audit-*.jsonl"))
    asked = ("audit", "show", *files, "--last", 100, "--action", "train")
    assert browser.get("/decisions/4.json?action=train").json() == shown(*asked)
    (row,) = browser.get("/alerts/4.json").json()
    assert row["condition"] == "AtollAgentDisconnected"


def test_the_pages_of_a_site_say_what_was_decided_by_which_rule_and_what_waits(browser: TestClient) -> None:
    requests = browser.get("/agents/4").text
    assert "atoll site approve RUN" in requests
    assert 'scope="row"><bdi>r-1</bdi>' in requests, "the update in the spool"
    decisions = browser.get("/decisions/4").text
    assert re.search(r"<bdi>train</bdi>.*<bdi>refused</bdi>.*<bdi>budget</bdi>.*<bdi>1</bdi>", decisions)
    wait_for(lambda: "sound: nothing is changed" in browser.get("/decisions/4").text or None)
    budgets = browser.get("/budgets/4").text
    assert "the budget of data set &#39;mri-2026&#39; is spent" in budgets
    assert "1.544" in budgets


def test_runs_are_chosen_by_boxes_that_work_without_scripts(browser: TestClient) -> None:
    text = browser.get("/").text
    boxes = re.findall(r'<input type="checkbox" form="compare" name="run" value="([^"]*)"', text)
    assert {"1/r", "2/many-1", "3/one", "3/sweep/a&lt;b&amp;c"} <= set(boxes)
    assert not any(box.startswith("4/") for box in boxes)
    assert '<form id="compare" method="get" action="/compare"' in text
    assert 'href="/compare?sweep=3%2Fsweep"' in text
    page = unescape(browser.get("/compare?run=3/one&run=3/sweep/torn&run=1/deleted&run=3/gone").text)
    assert "sweep/torn: " in page
    assert "deleted: there is no run" in page
    assert "gone: " in page
    assert '<input type="hidden" name="run" value="3/sweep/torn">' in page


def test_a_place_that_is_itself_a_sweep_has_its_table(places: list[str], key: bytes) -> None:
    app = Dashboard(sources([f"{places[2]}/sweep"])).app(door(key))
    found = TestClient(app, base_url=f"http://{HOST}")
    found.get("/login", params={"t": new_token(key, 999.0)})
    assert 'href="/compare?sweep=1%2F"' in found.get("/").text
    assert f"<title>Sweep {places[2]}/sweep" in found.get("/compare?sweep=1/").text


def test_a_log_is_read_to_its_end_by_pages_and_its_proof_is_shown(browser: TestClient) -> None:
    address, found = "/audit/1?count=70", list[int]()
    while address:
        text = browser.get(address).text
        found += [int(line) for line in re.findall(r'scope="row"><bdi>(\d+)</bdi>', text)]
        older = re.search(r'href="([^"]*)">Older<', text)
        address = older[1].replace("&amp;", "&") if older else ""
    assert len(found) == 300
    assert found == sorted(found, reverse=True)
    wait_for(lambda: "sound: nothing is changed" in browser.get("/audit/1").text or None)


def test_pages_of_a_long_list_follow_each_other(browser: TestClient) -> None:
    address, found = "/runs/2/many-1/rounds?count=50", list[int]()
    while address:
        text = browser.get(address).text
        found += [int(number) for number in re.findall(r'scope="row"><a href="/runs/2/many-1/rounds/(\d+)"', text)]
        older = re.search(r'href="([^"]*)">Older<', text)
        address = older[1].replace("&amp;", "&") if older else ""
        assert not older or "count=50" in address, "the size of a page stays"
    assert found == [*range(130, 0, -1)]


@pytest.mark.parametrize("of", ["rounds", "sites", "versions"])
def test_the_size_of_a_page_stays(browser: TestClient, of: str) -> None:
    after = re.findall(r'href="([^"]*after=[^"]*)"', browser.get(f"/runs/2/many-1/{of}?count=20").text)
    assert len(after) == 1
    assert "count=20" in after[0]


@pytest.mark.parametrize("address", [*WALKED, "/static/atoll.css", "/nothing", "/runs.json", "/live?run=1/r"])
def test_all_is_closed_without_a_session(stranger: TestClient, address: str) -> None:
    answer = stranger.get(address)
    assert answer.status_code == 403
    assert answer.text == "there is no session: `atoll dashboard link` prints a link that opens one\n"
    assert answer.headers.items() >= HEADERS.items()


@pytest.mark.parametrize("address", [*WALKED, "/login", "/live", "/static/atoll.css"])
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_is_changed(browser: TestClient, address: str, method: str) -> None:
    assert browser.request(method, address).status_code == 403


def test_another_host_and_another_origin_are_refused(browser: TestClient) -> None:
    assert browser.get("/", headers={"host": "evil.example"}).status_code == 403
    assert browser.get("/", headers={"origin": "http://evil.example"}).status_code == 403
    assert browser.get("/", headers={"origin": f"http://{HOST}"}).status_code == 200


def test_a_used_link_and_a_made_up_one_are_refused(stranger: TestClient, key: bytes) -> None:
    fresh = TestClient(stranger.app, base_url=f"http://{HOST}")
    token = new_token(key, 999.0)
    assert [fresh.get("/login", params={"t": token}).status_code for _ in range(2)] == [200, 403]
    for made_up in ("", "x", "a.b.c", "1.99999999999.0"):
        answer = fresh.get("/login", params={"t": made_up})
        assert answer.status_code == 403
        assert "atoll dashboard link" in answer.text
        assert "set-cookie" not in answer.headers


@pytest.mark.parametrize(
    ("address", "status", "why"),
    [
        ("/nothing", 404, "there is no page /nothing"),
        ("/runs/1/none", 404, "there is no run"),
        ("/runs/9/r", 404, "there is no place 9"),
        (f"{DEPLOYED}/rounds/77", 404, "no record of a round 77"),
        (f"{DEPLOYED}/rounds?count=1001", 404, "allowed: 1 to 1,000"),
        (f"{DEPLOYED}/rounds?count=x", 404, "allowed: 1 to 1,000"),
        (f"{DEPLOYED}/rounds?state=odd", 404, "state: got"),
        (f"{DEPLOYED}/rounds?after=odd", 404, "after: got"),
        (f"{DEPLOYED}/versions?after=-1", 404, "after: got"),
        ("/runs/3/none", 404, "no simulated run"),
        (f"/runs/3/{'a' * 5000}", 404, "no simulated run"),
        (f"{DEPLOYED}/rounds/{'9' * 25}", 404, ""),
        (f"/runs/{'9' * 5000}/r", 404, "there is no page"),
        ("/runs/3/..~1..~1etc", 404, "allowed: a folder at most 2 levels below"),
        ("/runs/3/one/sites", 404, "is a folder of simulations"),
        ("/runs/3/one/rounds/77", 404, "has no round 77"),
        ("/runs/3/sweep~1torn", 404, "is not a round"),
        ("/statistics/1?number=7", 404, "there are no statistics 7; there are 1 to 2"),
        ("/statistics/1?number=x", 404, "number: got"),
        (f"/audit/1?before={'9' * 30}", 404, "before: got"),
        ("/audit/1?count=0", 404, "allowed: 1 to 1,000"),
        ("/audit/3", 404, "is a folder of simulations"),
        ("/alerts/3", 404, "is a folder of simulations"),
        ("/runs/3/one/privacy", 404, "is a folder of simulations"),
        ("/runs/4/r", 404, "is an agent's state directory"),
        ("/members/4", 404, "is an agent's state directory"),
        ("/agents/1", 404, "is a coordinator: an agent's state directory alone"),
        ("/peers/3", 404, "is a folder of simulations"),
        ("/decisions/4?before=-1", 404, "before: got"),
        ("/compare", 404, "compare: got 0; allowed: 2 to 20"),
        ("/compare?run=1/r&run=1/r", 404, "compare: got 1; allowed: 2 to 20"),
        ("/compare?" + "&".join(f"run=1/{number}" for number in range(21)), 404, "compare: got 21"),
        ("/compare?run=9/r&run=1/r", 404, "'9/r' names no place (known: 1 to 4)"),
        ("/compare?run=1/r&run=3/one&over=odd", 404, "over: got 'odd'; allowed: round, bytes, seconds"),
        ("/compare?run=1/r&run=3/one&metric=odd", 404, "metric: got 'odd'; allowed:"),
        ("/compare?sweep=3/none", 404, "has no simulations in such a folder"),
        ("/compare?sweep=1/r", 404, "is a coordinator: a folder of simulations alone has sweeps"),
        ("/members/3", 404, "is a folder of simulations"),
        ("/static/../access.py", 404, ""),
        ("/static/%2e%2e/access.py", 404, ""),
    ],
)
def test_what_there_is_not_has_a_sentence(browser: TestClient, address: str, status: int, why: str) -> None:
    answer = browser.get(address)
    assert answer.status_code == status
    assert why in unescape(answer.text)
    assert "Traceback" not in answer.text


def test_a_fault_of_json_is_json(browser: TestClient) -> None:
    answer = browser.get("/runs/1/none.json")
    assert answer.status_code == 404
    assert answer.json()["faults"][0].startswith("there is no run")


@pytest.mark.parametrize("place", ["01", "0", "", "x", "\u0661", "9" * 5000])
def test_a_stream_has_one_spelling_of_a_place(places: list[str], place: str) -> None:
    with pytest.raises(AtollError, match="there is no place"):
        Dashboard(sources(places))._run(f"{place}/r")


def test_pages_without_live_change_have_no_stream(places: list[str], key: bytes) -> None:
    app = Dashboard(sources(places), is_live=False).app(door(key))
    browser = TestClient(app, base_url=f"http://{HOST}")
    browser.get("/login", params={"t": new_token(key, 999.0)})
    assert "live.js" not in browser.get(DEPLOYED).text
    assert browser.get("/live?run=1/r").status_code == 404


def test_a_half_written_simulation_is_named_and_hides_no_other(browser: TestClient) -> None:
    rows = {row["run"]: row for place in browser.get("/runs.json").json() for row in place["runs"]}
    assert rows["one"]["version"] == 3
    assert rows["one"]["state"] == "interrupted"
    assert rows["sweep/torn"]["state"] == "unreadable"
    assert "line 2: is not a round" in rows["sweep/torn"]["cause"]
    assert HOSTILE in browser.get("/runs/3/one/rounds/1.json").json()["fates"], "JSON is unchanged"
