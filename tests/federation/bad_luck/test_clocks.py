"""Clocks of real processes that are set while the federation lives: the coordinator says it, and rounds go on."""

import re

import pytest

from tests.cli.invoking import ran
from tests.federation.bad_luck.set_clock import SetClock, needs_compiler
from tests.federation.processes import federation
from tests.turns import in_turn

pytestmark = [needs_compiler]

FAST = {"rounds": 100_000, "pause": 0.2, "round__cohort_size": 1, "round__quorum": 1, "evaluation__clients_every": 0}


def committed(it):
    return it.log("coordinator").count("committed as")


def goes_on(it):
    """Wait for three more rounds."""
    before = committed(it)
    it.wait_for(lambda: committed(it) >= before + 3)


def runs(it):
    return it.show("run", "list")


def audited(it, action):
    return [
        line
        for path in it.folder.glob("state/audit/audit-*.jsonl")
        for line in path.read_text().splitlines()
        if f'"action":"{action}"' in line
    ]


def refused(it, settings):
    """Start the coordinator, which is refused; return what it says."""
    assert it.coordinator(**settings).wait(60) == 2
    said = it.log("coordinator").splitlines()[-1]
    del it.running["coordinator"]
    return said


@pytest.mark.parametrize("back", [in_turn(back, number=n, days=2) for n, back in enumerate((-700, -200_000))])
def test_a_running_coordinator_whose_clock_is_set_right_signs_true_times_at_once(tmp_path, back):
    clock = SetClock(tmp_path, -back)  # began ahead, as its site did
    with federation(tmp_path) as it:
        it.coordinator(environment=clock.environment, **FAST)
        it.agent("north", environment=clock.environment)
        goes_on(it)
        assert runs(it)[0]["clocks"] == []
        clock.set(0)
        it.wait_for(lambda: "this machine's clock was set back by" in it.log("coordinator"))
        goes_on(it)
        assert any("the journal's clock shows" in sentence for sentence in runs(it)[0]["clocks"])
        skewed = (it.log("coordinator") + it.log("north")).count("clock_skew")
        assert skewed <= 1, "a message that was on its way when the clock was set, and none that was signed afterwards"
        it.wait_for(lambda: audited(it, "clock.jump"))


def test_a_start_with_a_wrong_clock_is_refused_until_it_is_accepted_and_no_retry_is_spent(tmp_path):
    clock, more = SetClock(tmp_path), {**FAST}
    with federation(tmp_path) as it:
        more["environment"] = clock.environment
        it.coordinator(**more)
        it.agent("north")
        goes_on(it)
        it.kill("coordinator")
        clock.set(3600)
        assert re.search(
            r"this machine's clock shows .* UTC, 1 h 0 min ahead of .* start once with --accept-clock",
            refused(it, more),
        )
        it.coordinator(stay=True, extra=("--accept-clock",), **more)  # RTC before NTP, and an operator in a hurry
        it.wait_for(lambda: "the clock of site north is 1 h 0 min behind" in it.log("coordinator"))
        assert "this site's clock" not in it.log("north")
        it.wait_for(lambda: re.search(r"the clock of site north shows .* UTC, 1 h 0 min behind", it.log("north")))
        assert any("site north is 1 h 0 min behind" in sentence for sentence in runs(it)[0]["clocks"])
        before = committed(it)
        clock.set(0)
        it.wait_for(lambda: committed(it) >= before + 3)
        assert runs(it)[0]["state"] == "running"
        assert not re.search("attempt|retry", it.log("coordinator"))
        assert len(audited(it, "clock.accept")) == 1
        it.kill("coordinator")
        it.coordinator(**more)  # the last true time is the right one again
        goes_on(it)


def test_a_certificate_that_a_clock_ahead_has_made_is_made_anew_by_a_right_one(tmp_path):
    clock = SetClock(tmp_path, 86_400)
    with federation(tmp_path) as it:
        it.coordinator(environment=clock.environment, stay=True, **FAST)
        it.wait_for(lambda: "invite a site" in it.log("coordinator"))
        it.kill("coordinator")
        assert re.search(r"(1 d 0 h|23 h 59 min) behind the journal's last true time", refused(it, FAST))
        it.coordinator(stay=True, extra=("--accept-clock",), **FAST)
        it.wait_for(lambda: it.log("coordinator").count("invite a site") == 2)
        assert "is not valid yet, only from" in it.log("coordinator")
        ran("client", "invite", "north", "--state", it.state)
