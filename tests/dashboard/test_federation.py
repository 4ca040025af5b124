"""A coordinator and agents as real processes: each commit comes to a page by itself, over a real socket."""

import json
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.cli.federation import federation, start_run, wait_for
from tests.dashboard.test_process import dashboard, get
from tests.waiting import BOUND_S

pytestmark = pytest.mark.real


def test_every_commit_is_told_and_is_on_the_page_that_is_read_then(tmp_path: Path) -> None:
    with federation(tmp_path) as it, dashboard(str(it.state), home=tmp_path) as (process, link):
        run = start_run(it, "told", "rounds=3", "pause=2.0", "round.min_available=2")["run"]
        cookie = get(link, link.partition(urlsplit(link).netloc)[2])[1]
        seen: list[int] = []
        connection = HTTPConnection(urlsplit(link).netloc, timeout=BOUND_S)
        try:
            connection.request("GET", f"/live?run=1/{run}", headers={"Cookie": cookie})
            answer = connection.getresponse()
            assert answer.getheader("content-type") == "text/event-stream; charset=utf-8"
            while not seen or seen[-1] < 3:
                line = answer.readline().decode()
                assert line, "the stream has ended"
                if line.startswith("data: "):
                    news = json.loads(line.removeprefix("data: "))
                    assert (news["run"], news["fault"]) == (f"1/{run}", "")
                    seen.append(json.loads(get(link, f"/runs/1/{run}.json", cookie)[2])["version"])
            # the page may have read a version of which its follower is told a moment later
            wait_for(lambda: "committed as version 3" in get(link, f"/runs/1/{run}", cookie)[2] or None)
        finally:
            connection.close()
        assert seen == sorted(seen)
        status, _, page = get(link, f"/runs/1/{run}", cookie)
        assert status == 200
        assert "version 3 of 3" in page
        assert process.poll() is None
