"""An authority that is replaced under a federation of real processes: no member enrols anew, and rounds go on."""

import time

from tests.cli.invoking import said, shown
from tests.federation.processes import TASK, federation
from tests.waiting import BOUND_S

LIFE_S = 8
FAST = {"rounds": 100_000, "pause": 0.2, "round__cohort_size": 1, "round__quorum": 1, "evaluation__clients_every": 0}


def authority(it, command, *more):
    place = it.state / "identity" / "authority"
    return shown("authority", command, place, *more)


def test_a_site_follows_the_replacement_of_the_authority_by_its_renewals(tmp_path):
    with federation(tmp_path) as it:
        settings = {**FAST, "coordinator__certificate_lifetime": LIFE_S, "stay": True}

        def committed():
            return it.log("coordinator").count("committed as")

        def goes_on():
            before = committed()
            it.wait_for(lambda: committed() >= before + 2)

        def restart():
            """Restart the coordinator while the site's certificate is new: the end of one meanwhile ends the agent."""
            renewed = it.log("north").count("is renewed")
            it.wait_for(lambda: it.log("north").count("is renewed") > renewed)
            it.running["coordinator"].terminate()
            it.running["coordinator"].wait(BOUND_S)
            it.coordinator(**settings)
            goes_on()

        it.coordinator(**settings)
        it.wait_for(lambda: "invite a site" in it.log("coordinator"))
        code = said("client", "invite", "north", "--state", it.state).strip()
        there = ("--site", "north", "--state", tmp_path / "north", "--set", "reconnect_max=0.5")
        it.start("north", "agent", TASK, *there, "--join", code)
        goes_on()
        first = authority(it, "show")
        following = authority(it, "replace", "--name", "the next one")["next"]
        assert following["begun_at"] is None
        restart()
        until = authority(it, "show")["next"]["alone_from"]
        assert until - time.time() < 2 * LIFE_S
        it.wait_for(lambda: time.time() > until + LIFE_S)  # every certificate of the first authority has ended
        goes_on()
        restart()
        shown = authority(it, "show")
        assert shown["fingerprint"] == following["fingerprint"] != first["fingerprint"]
        assert shown["next"] is None
        assert it.running["north"].poll() is None
        assert it.log("north").count("enrolled as") == 1
