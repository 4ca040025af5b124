"""Sites with policies of their own: a coordinator that asks for more is refused, and the record says why."""

from tests.cli.invoking import shown
from tests.client.policy.test_gate import written
from tests.federation.processes import federation
from tests.waiting import BOUND_S

ALL = 'tasks = ["*"]\nruns = ["trouble-*"]\n'


def test_what_a_site_does_not_allow_is_refused_on_the_record_and_the_rounds_go_on(tmp_path):
    """b waits for its operator; c allows one round a day and is killed after that one was counted."""
    for site, rule in {"b": 'approval = "each_run"\n', "c": "rounds_per_day = 1\n"}.items():
        (tmp_path / f"{site}.toml").write_text(ALL + rule)
    with federation(tmp_path) as it:
        it.coordinator(round__cohort_size=3, round__quorum=1, rounds=6)
        it.agent("a", environment={"TROUBLE_SLEEP": "0.5"})
        it.agent("b", policy=tmp_path / "b.toml")
        died = it.agent("c", policy=tmp_path / "c.toml", environment={"ATOLL_CRASH_AT": "agent.downloaded"})
        died.wait(BOUND_S)
        it.agent("c", policy=tmp_path / "c.toml")
        it.wait_for(lambda: it.rounds() and it.rounds()[0].clients["b"].reason == "awaits_approval")
        assert shown("site", "approve", "trouble-1", "--state", tmp_path / "b")["standing"] == "approved"
        assert it.wait_for_end() == 0
        rounds = it.rounds()
        assert [record.phase for record in rounds] == ["committed"] * 6, "nobody waited for who had declined"
        assert any(record.clients["b"].digest for record in rounds if "b" in record.clients)
        begun = {int(line["object"].split()[1]) for line in decisions(it, "c") if line["action"] == "train.allowed"}
        assert len(begun) == 1
        refused = [r.clients["c"] for r in rounds if "c" in r.clients and r.clients["c"].reason]
        assert {client.reason for client in refused} == {"policy_refused"}
        assert refused[0].detail == "rounds_per_day: 1 round was begun today; allowed: 1"
        assert "its site's own policy does not allow it" in str(it.show("round", "show", str(max(begun) + 1)))


def decisions(it, site):
    return written(it.folder / site)
