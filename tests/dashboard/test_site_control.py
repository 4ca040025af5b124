"""The forms of a site's page: they approve and reject what was asked of it, as the commands do."""

import re
from collections.abc import Callable
from contextlib import closing
from html import unescape
from pathlib import Path
from urllib.parse import quote

import pytest
from starlette.testclient import TestClient

from atoll.client.policy.decide import Kind, PolicyRequest
from atoll.client.policy.history import PolicyHistory
from atoll.dashboard.app import Dashboard
from atoll.dashboard.pages.agents import DECIDED_MAX
from atoll.dashboard.proxied import ProxyDoor, Users
from atoll.dashboard.sources import sources
from atoll.operations.local_audit import os_user
from tests.cli.invoking import shown
from tests.dashboard.conftest import HOSTILE, write_agent
from tests.dashboard.test_control import ORIGIN, Browser

Sent = Callable[..., tuple[int, str]]


@pytest.fixture
def state(tmp_path: Path) -> Path:
    write_agent(tmp_path / "atoll-agent-north")
    return tmp_path / "atoll-agent-north"


@pytest.fixture
def client(state: Path) -> TestClient:
    return Browser([str(state)], is_controlled=True).client


def asks(state: Path, run_id: str, local: str = "{}") -> None:
    request = PolicyRequest(kind=Kind.EVALUATE, run_id=run_id, task="t", number=1, local=local)
    with closing(PolicyHistory(state)) as history:
        history.asked(request, 1_777_896_000.0)


def form(client: TestClient, run: str, headers: dict[str, str] | None = None) -> dict[str, str]:
    """Return the hidden values of the form of a request, on the page of the request."""
    answer = client.get("/agents/1/control", params={"run": run}, headers=headers)
    assert answer.status_code == 200, answer.text
    return dict(re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', answer.text))


def sent(client: TestClient, act: str, run: str, given: dict[str, str]) -> tuple[int, str]:
    answer = client.post(f"/agents/1/control/{act}", params={"run": run}, data=given, headers=ORIGIN)
    assert "<script>alert" not in answer.text
    assert "\u202e" not in answer.text
    return answer.status_code, unescape(answer.text)


def standing(state: Path, run: str) -> str:
    return next(str(row["standing"]) for row in shown("site", "list", "--state", state) if row["run"] == run)


@pytest.mark.parametrize("run", ["r-1", HOSTILE])
def test_a_request_is_approved_and_rejected_as_by_the_commands(client: TestClient, state: Path, run: str) -> None:
    page = unescape(client.get("/agents/1").text)
    assert f'action="/agents/1/control/approve?run={quote(run, safe="")}"' in page.replace("+", "%20")
    terms = form(client, run)
    assert {"token", "terms", "standing"} == set(terms)
    status, done = sent(client, "approve", run, terms)
    assert (status, "is approved, for task" in done) == (200, True), done
    assert standing(state, run) == "approved"
    status, done = sent(client, "reject", run, terms)
    assert (status, "it is approved now, and was undecided when you looked; nothing is rejected" in done) == (400, True)
    again = form(client, run)
    assert again["standing"] == "approved"
    assert (sent(client, "reject", run, again)[0], standing(state, run)) == (200, "rejected")
    newest = shown("audit", "show", *sorted((state / "decisions").glob("audit-*.jsonl")), "--last", 2)["events"]
    assert [(one["action"], one["role"], one["actor"], one["object"]) for one in newest] == [
        ("site.approved", "local", os_user(), run),
        ("site.rejected", "local", os_user(), run),
    ]
    assert newest[0]["outcome"] == f"terms {terms['terms']}"
    for link in dict.fromkeys(re.findall(r'<a href="([^"]+)">The ', done)):
        assert client.get(link).status_code == 200, link
    assert "site.rejected" in client.get("/decisions/1?action=site").text


def test_the_links_of_an_answer_lead_to_what_it_has_changed(client: TestClient, state: Path) -> None:
    done = client.post("/agents/1/control/reject", params={"run": "r-1"}, data=form(client, "r-1"), headers=ORIGIN).text
    seen = dict(re.findall(r'<a href="([^"]+)">(The \w+)<', unescape(done)))
    assert seen == {"/agents/1?text=r-1": "The request", "/decisions/1?action=site": "The log"}
    assert "<bdi>rejected</bdi>" in client.get("/agents/1?text=r-1").text
    assert "<bdi>site.rejected</bdi>" in client.get("/decisions/1?action=site").text


def test_other_terms_are_not_approved_and_are_rejected(client: TestClient, state: Path) -> None:
    seen = form(client, "r-1")
    asks(state, "r-1", '{"lr": 9}')
    status, page = sent(client, "approve", "r-1", seen)
    assert (status, f"run r-1 does not ask on the terms '{seen['terms']}'" in page) == (400, True)
    assert standing(state, "r-1") == "undecided"
    assert (sent(client, "reject", "r-1", seen)[0], standing(state, "r-1")) == (200, "rejected")


def test_a_request_that_is_gone_decides_about_no_other_one(client: TestClient, state: Path) -> None:
    asks(state, "digits-1")
    asks(state, "digits-1-1")  # a run with the name digits-1, and the same terms
    seen = form(client, "digits-1")
    with closing(PolicyHistory(state)) as history:
        history.forget("digits-1")
    for act in ("approve", "reject"):
        status, page = sent(client, act, "digits-1", seen)
        assert (status, "run 'digits-1' has not asked here, or was forgotten" in page) == (400, True)
    assert standing(state, "digits-1-1") == "undecided"


def test_a_decision_that_the_log_does_not_have_says_so(client: TestClient, state: Path) -> None:
    (state / "decisions").rename(state / "away")
    (state / "decisions").write_text("no folder")
    status, page = sent(client, "approve", "r-1", form(client, "r-1"))
    assert (status, standing(state, "r-1")) == (200, "approved")
    assert "not written to the log of decisions: " in page


def test_a_flood_of_requests_keeps_the_page_small_and_each_one_is_reached(client: TestClient, state: Path) -> None:
    for number in range(600):
        asks(state, f"flood-{number}", '{"x": "' + "<" * 200 + '"}')
    page = client.get("/agents/1")
    assert page.text.count('method="post"') == DECIDED_MAX
    assert len(page.content) < 1_000_000
    assert 'action="/agents/1/control/approve?run=flood-599"' in client.get("/agents/1?text=flood-599").text
    assert form(client, "flood-599")["standing"] == "undecided"


def test_behind_a_proxy_an_owner_alone_decides_and_is_named(state: Path, tmp_path: Path) -> None:
    users = tmp_path / "users.toml"
    users.write_text('hosts = ["127.0.0.1:7080"]\n[users]\nann = "owner"\nolga = "operator"\nbob = "auditor"\n')
    door = ProxyDoor(Users(str(users)), "x-user")
    app = Dashboard(sources([str(state)]), is_controlled=True).app(door)
    browser = TestClient(app, base_url="http://127.0.0.1:7080")
    ann = {"x-user": "ann"}
    seen = form(browser, "r-1", ann)
    path = "/agents/1/control/approve?run=r-1"
    for name in ("olga", "bob"):
        other = {"x-user": name}
        assert "control" not in browser.get("/agents/1", headers=other).text
        answer = browser.get("/agents/1/control?run=r-1", headers=other)
        assert (answer.status_code, "for a site decides the role owner" in answer.text) == (403, True)
        assert browser.post(path, data=seen, headers={**ORIGIN, **other}).status_code == 403
    assert browser.post(path, data=seen, headers={**ORIGIN, **ann}).status_code == 200
    (newest,) = shown("audit", "show", *sorted((state / "decisions").glob("audit-*.jsonl")), "--last", 1)["events"]
    assert (newest["actor"], newest["outcome"]) == (os_user(), f"terms {seen['terms']}")
    assert newest["on_behalf_of"] == "ann"
    assert f"<bdi>{os_user()} for ann</bdi>" in browser.get("/decisions/1?actor=ann", headers=ann).text
