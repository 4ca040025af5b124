"""Sites that demand secure sums among pinned sites, as their operators run them: processes, sockets, commands."""

from contextlib import closing
from itertools import permutations

from atoll.client.policy.gate import Gate
from atoll.client.site.security import SiteSecurity
from atoll.protocol.identity.keeper import Keeper
from atoll.protocol.identity.names import Identity, Role
from atoll.protocol.secure.site_key import shown as shown_key
from benchmarks.members import equip
from tests.cli.invoking import ran, shown
from tests.client.policy.test_gate import written
from tests.federation.processes import federation
from tests.federation.test_secure_sums import SECURE

DEMANDS = 'tasks = ["*"]\nruns = ["*"]\n[secure]\nrequired = true\ntrust = "pinned"\n'
SITES = "abcd"


def introduced(it, sites=SITES, stranger=""):
    """Give each site its certificate, its policy and its key, as a first start does, and have all pin each other.

    `stranger`: a site whose key the others do not pin.
    """
    prints = {}
    for site in sites:
        folder, policy = it.folder / site, it.folder / f"{site}.toml"
        policy.write_text(DEMANDS)
        equip(it.state, folder, Identity(Role.CLIENT, site))
        with closing(Gate(policy, folder)) as gate:
            prints[site] = SiteSecurity(site, folder, gate, Keeper(folder / "identity")).fingerprint
    for site, other in permutations(sites, 2):
        if other == stranger:
            continue
        ran("site", "trust", other, prints[other], "--state", it.folder / site)
    return prints


def started(it, sites=SITES):
    for site in sites:
        it.agent(site, policy=str(it.folder / f"{site}.toml"))


def actions_of(it, site):
    """Return what the log of decisions of a site says of sums."""
    return [line["action"] for line in written(it.folder / site) if line["action"].startswith("secure.")]


def check_sums(it, sites, num_sums, threshold):
    """Check that sites have signed each sum, and that enough of them have revealed their shares.

    A site whose reveal comes too late for a sum that others have opened is not asked again.
    """
    for site in sites:
        signed = [action for action in actions_of(it, site) if action != "secure.opened"]
        assert signed == ["secure.joined", "secure.signed"] * num_sums, site
    assert sum(actions_of(it, site).count("secure.opened") for site in sites) >= num_sums * threshold


def test_pinned_sites_that_demand_sums_finish_a_secure_run(tmp_path):
    with federation(tmp_path) as it:
        it.coordinator(**SECURE, rounds=2)
        prints = introduced(it)
        started(it)
        assert it.wait_for_end() == 0
        assert [record.phase for record in it.rounds()] == ["committed"] * 2
        for site in SITES:
            assert it.wait_for_end(site) == 0
            assert shown("site", "fingerprint", "--state", it.folder / site, "--json")["fingerprint"] == prints[site]
            peers = shown("site", "peers", "--state", it.folder / site, "--json")
            assert {row["sessions"] for row in peers} == {2}
            assert not any(row["forked"] for row in peers)
        check_sums(it, SITES, num_sums=2, threshold=3)


def test_a_site_that_the_others_have_not_pinned_costs_itself_its_place_and_round_show_says_the_way_out(tmp_path):
    with federation(tmp_path) as it:
        it.coordinator(**SECURE, rounds=1)
        prints = introduced(it, stranger="d")
        started(it)
        assert it.wait_for_end() == 0
        (record,) = it.rounds()
        assert record.phase == "committed"
        assert {site: record.clients[site].fate for site in SITES} == {
            **dict.fromkeys("abc", "reported"),
            "d": "failed",
        }
        assert (record.sums[0].attempt, record.sums[0].left_out) == (2, ["d"])
        told = " ".join(str(it.show("round", "show", "1")).split())
        assert "d was left out: a, b and c refused it" in told
        assert f"d is not pinned here; its site key is {shown_key(prints['d'])}" in told
        assert (
            "if that is a mistake: `atoll site trust d FINGERPRINT` at a, b and c, as the operator of d reads" in told
        )
        for site in "abc":
            assert actions_of(it, site) == [
                "secure.joined",
                "secure.left",
                "secure.joined",
                "secure.signed",
                "secure.opened",
            ]


def test_sites_that_demand_sums_decline_a_plain_run_and_say_why(tmp_path):
    with federation(tmp_path) as it:
        it.coordinator(rounds=1, wait__most=1.0, stay=True)
        introduced(it, "ab")
        started(it, "ab")

        def refusals():
            found = [line for site in "ab" for line in written(it.folder / site) if line["action"] == "train.refused"]
            return found if len(found) >= 2 else None

        for line in it.wait_for(refusals):
            assert line["outcome"] == "secure: a training outside of a secure sum: this site demands one"
        for site in "ab":
            assert not list((it.folder / site / "spool").iterdir())
