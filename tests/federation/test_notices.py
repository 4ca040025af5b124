"""A person is told by real processes: once for each condition and hour, also after kills; and by hand."""

import json
import time
from collections import Counter

import pytest

from tests.cli.invoking import ran, said
from tests.federation.processes import TASK, federation
from tests.protocol.notices.receivers import http_server, mail_server

FAST = {"rounds": 1, "round__cohort_size": 1, "round__quorum": 1, "evaluation__clients_every": 0, "notify__away": 1}
NO_PROXY = {"http_proxy": "", "HTTP_PROXY": "", "no_proxy": "127.0.0.1"}


def test_a_run_that_finishes_and_a_site_that_goes_are_told_once_whatever_is_killed(tmp_path):
    with http_server() as server, federation(tmp_path) as it:
        settings = {**FAST, "notify__url": server.url, "environment": NO_PROXY, "stay": True}

        def told():
            return Counter((body["condition"], body["subject"]) for body in server.bodies)

        def north(*join):
            there = ("--site", "north", "--state", tmp_path / "north")
            it.start("north", "agent", TASK, *there, "--set", "reconnect_max=0.5", *join)

        it.coordinator(**settings)
        it.wait_for(lambda: "invite a site" in it.log("coordinator"))
        code = said("client", "invite", "north", "--state", it.state).strip()
        north("--join", code)
        it.wait_for(lambda: told()[("run_finished", "trouble-1")] > 0)
        it.kill("north")
        it.wait_for(lambda: told()[("away", "north")] > 0)
        for number in (2, 3):
            it.kill("coordinator")
            it.coordinator(**settings)
            it.wait_for(lambda number=number: it.log("coordinator").count("atoll coordinator on ") == number)
            it.wait_for(lambda: any("is away since" in one for one in it.show("run", "list")[0]["notices"]))
        time.sleep(2.5)  # two more looks
        [shown] = it.wait_for(lambda: it.show("run", "list")[0]["notices"] or None)  # the first one may come later
        assert told() == {("run_finished", "trouble-1"): 1, ("away", "north"): 1}
        assert shown == next(body["message"] for body in server.bodies if body["condition"] == "away")
        assert it.log("coordinator").count("site north is away since") == 1
        assert "secret" not in it.log("coordinator")
        north()
        it.wait_for(lambda: it.show("run", "list")[0]["notices"] == [])


def test_a_coordinator_that_ends_with_its_run_has_told_it(tmp_path):
    with federation(tmp_path) as it:
        out = tmp_path / "told.json"
        it.coordinator(**FAST, notify__command=f"tee {out}")
        it.agent("north")
        assert it.wait_for_end() == 0
        assert json.loads(out.read_text())["condition"] == "run_finished"


@pytest.mark.parametrize("command", ["coordinator", "agent"])
def test_a_wrong_table_ends_a_start_before_its_first_step(tmp_path, command):
    toml = tmp_path / f"{command}.toml"
    toml.write_text('[notify]\ncommand = "atoll-no-such"\n' + ("[coordinator]\n" if command == "coordinator" else ""))
    what = [toml, "--state", tmp_path / "state"]
    if command == "agent":
        what = ["math:pi", "--site", "north", "--config", toml, "--state", tmp_path / "state"]
    for check in ([], ["--check"]):
        done = ran(command, *what, *check, code=2)
        assert "notify.command: there is no program 'atoll-no-such'" in done.stderr
    assert not (tmp_path / "state").exists()


def test_a_table_is_tried_by_hand(tmp_path):
    toml = tmp_path / "agent.toml"
    with mail_server() as server:
        toml.write_text(f'site = "north"\n[notify]\nmail = "a@b.c"\nsmtp = "smtp://{server.address}"\n')
        assert said("notify", toml) == f"delivered to mail to a@b.c over {server.address}\n"
        assert "this is a test of [notify]" in server.mails[0][2]
    assert "Connection refused" in ran("notify", toml, code=2).stderr
