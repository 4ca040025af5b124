"""Statistics in two secure sums, with the death of the coordinator or of sites at each step: exact, or asked again."""

import json
import signal

import pytest

from tests.federation.processes import federation
from tests.federation.statistics.test_secure import (
    TASK,
    asking,
    check_sum,
    hosting,
    introduced,
    joined,
    serving,
    started,
)
from tests.waiting import BOUND_S

SITES = "abcdefg"
STEPS = {
    "asked": {"coordinator": "statistics.asked:1"},
    "sites of the first sum": {"coordinator": "statistics.sites_kept:1"},
    "sites of both sums": {"coordinator": "statistics.sites_kept:2"},
    "first sum opened": {"coordinator": "statistics.opened:1"},
    "both sums opened": {"coordinator": "statistics.opened:2"},
    "joined": {"a": "agent.promised/joined:1"},
    "masked": {"b": "agent.masked:1"},
    "signed": {"c": "agent.promised/signed:1"},
    "revealed": {"d": "agent.revealed:1"},
    "coordinator and site": {"coordinator": "statistics.sites_kept:1", "e": "agent.masked:1"},
    "two sites": {"f": "agent.promised/joined:1", "g": "agent.promised/signed:1"},
}


@pytest.fixture
def sites():
    """Name the sites that have a file."""
    return SITES


def ask(it, rows):
    """Ask for the statistics in two sums, hold what comes against the rows, and return it; None: no answer came."""
    process = asking(it, "--set", "secure.session_max=5")
    told, said = process.communicate(timeout=180)
    assert process.returncode in (0, 2), said
    assert "Traceback" not in said
    if process.returncode:
        assert "the coordinator at" in said
        return None
    found = json.loads(told)
    if found["answered"]:
        check_sum(found, rows, found["answered"], found["secure"])
    assert found["secure"]["sites"] == len(found["answered"])
    return found


@pytest.mark.long
@pytest.mark.parametrize("crash_at", STEPS.values(), ids=STEPS)
def test_a_death_at_any_step_of_two_sums_costs_no_site_its_numbers(tmp_path, rows, crash_at):
    """Each answer is exact; with all processes back it is over the same sites twice, and the others are named."""
    of_coordinator = {"ATOLL_CRASH_AT": crash_at["coordinator"]} if "coordinator" in crash_at else {}
    with federation(tmp_path, task=TASK) as it:
        introduced(it, SITES)
        hosting(it, of_coordinator)
        started(it, SITES, crash_at)
        first = ask(it, rows)
        assert (first is None) == bool(of_coordinator)
        for name in crash_at:
            assert it.running[name].wait(BOUND_S) == -signal.SIGKILL, f"{name} did not come to its step"
        it.log_before = len(it.log("coordinator"))
        for name in crash_at:
            if name == "coordinator":
                hosting(it)
            else:
                serving(it, name)
        joined(it, SITES if of_coordinator else crash_at)
        again = [ask(it, rows) for _ in range(2)]
        assert again[0]["answered"] == again[1]["answered"]
        for found in (first, *again):
            if found is not None:
                lost = [site for each in found["secure"].get("lost", ()) for site in each["sites"]]
                assert sorted({*found["answered"], *found["refused"], *lost}) == [*SITES]
                assert len(found["answered"]) >= 3
        assert not any("Traceback" in it.log(name) for name in it.running)
