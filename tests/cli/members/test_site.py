"""`atoll site ...`, and the policy on the agent's command line."""

import json
import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.cli.members import site
from atoll.client.disk.seen_store import Memory
from atoll.client.disk.state_directory import StateDirectory
from atoll.client.policy.decide import ALLOWED, Kind, PolicyRequest
from atoll.client.policy.decisions import DecisionLog
from atoll.client.policy.file import PolicyFile
from atoll.client.policy.history import PolicyHistory
from atoll.client.session.rollback_rules import Seen
from atoll.protocol.vocabulary import RoundId, RunId
from tests.cli.invoking import invoke, refused, said

ASKS = PolicyRequest(kind=Kind.EVALUATE, run_id="digits-1", task="digits:task", number=1, local='{"lr": 0.1}')


@pytest.fixture
def state(tmp_path: Path) -> Path:
    (tmp_path / "atoll-agent-north").mkdir()
    with closing(PolicyHistory(tmp_path / "atoll-agent-north")) as history:
        history.asked(ASKS, 1_777_896_000.0)
    return tmp_path / "atoll-agent-north"


def test_a_run_is_listed_approved_rejected_and_forgotten(state: Path) -> None:
    def shown(*command: object) -> object:
        return json.loads(invoke("site", *command, "--state", state, "--json").stdout)

    [row] = shown("list")
    assert (row["run"], row["task"], row["standing"], row["decided_at"]) == (
        "digits-1",
        "digits:task",
        "undecided",
        None,
    )
    assert shown("approve", "digits-1")["standing"] == "approved"
    assert "approved" in invoke("site", "list", "--state", state).stdout
    assert shown("reject", "digits-1")["standing"] == "rejected"
    assert invoke("site", "forget", "digits-1", "--state", state).stdout == "run digits-1 is forgotten\n"
    assert shown("list") == []


@pytest.mark.slow
def test_terms_that_changed_between_the_look_and_the_word_are_not_approved(state: Path) -> None:
    def listed() -> dict[str, str]:
        [row] = json.loads(invoke("site", "list", "--state", state, "--json").stdout)
        return row

    def asks(local: str, codec: str) -> None:
        with closing(PolicyHistory(state)) as history:
            terms = {"local": local, "algorithm": "fedavg", "codec": codec}
            history.asked(replace(ASKS, kind=Kind.TRAIN, **terms), 1_777_896_001.0)

    seen, terms = set(), listed()["terms"]
    for local, codec in (('{"lr": 0.1}', ""), ('{"lr": 9}', ""), ('{"lr": 9}', "topk:0.01")):
        seen.add(terms)
        asks(local, codec)
        assert refused("site", "approve", "digits-1", "--terms", terms, "--state", state) == [
            f"run digits-1 does not ask on the terms '{terms}': nothing is approved",
            "`atoll site list` shows its present terms",
        ]
        assert (listed()["standing"], listed()["decided_at"]) == ("undecided", None)
        terms = listed()["terms"]
    assert len({*seen, terms}) == 4
    assert terms in invoke("site", "list", "--state", state).stdout
    assert "approved" in said("site", "approve", "digits-1", "--terms", terms, "--state", state)
    assert (listed()["standing"], listed()["terms"]) == ("approved", terms)


def test_the_agents_directory_need_not_be_named_when_there_is_one(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(state.parent)
    assert "digits-1" in invoke("site", "list").stdout
    (state.parent / "atoll-agent-south").mkdir()
    PolicyHistory(state.parent / "atoll-agent-south").close()
    assert refused("site", "list") == [
        "name the agent's state directory with --state DIR; several are here: atoll-agent-north, atoll-agent-south"
    ]
    (state.parent / "empty").mkdir()
    monkeypatch.chdir(state.parent / "empty")
    assert refused("site", "approve", "x") == [
        "name the agent's state directory with --state DIR; none is in the current directory"
    ]


def test_a_mistake_is_refused_and_creates_no_file(state: Path) -> None:
    assert refused("site", "approve", "digits-2", "--state", state) == [
        "run 'digits-2' has not asked here: did you mean digits-1? (known: digits-1)"
    ]
    missing = state.parent / "nowhere"
    assert refused("site", "list", "--state", missing) == [
        f"{missing} is not an agent's state directory: it has no policy.db; name another with --state"
    ]
    assert not missing.exists()
    assert not (state / "policy.db-wal").exists(), "a refused command lets go of the file"
    os.truncate(state / "policy.db", 100)
    assert "cannot be used" in refused("site", "list", "--state", state)[0]


def test_an_agent_does_not_start_with_a_policy_that_is_not_valid(tmp_path: Path) -> None:
    invoke("new", tmp_path)
    agent = (
        "agent",
        "tests/federation/misbehaving_sites_task.py:task",
        "--site",
        "a",
        "--check",
        "--policy",
        tmp_path / "policy.toml",
    )
    assert f'policy = "{tmp_path / "policy.toml"}"' in invoke(*agent).stdout
    assert PolicyFile(tmp_path / "policy.toml").policy is not None
    (tmp_path / "policy.toml").write_text('runs = ["*"]\nrounds = 3\n')
    missing, unknown = refused(*agent)
    assert "policy.toml: tasks: missing; allowed: list of (string" in missing
    assert "policy.toml: rounds: unknown key (did you mean runs?" in unknown
    (tmp_path / "policy.toml").unlink()
    assert refused(*agent) == [f"there is no {tmp_path / 'policy.toml'}"]


def test_every_commented_line_of_the_new_project_s_policy_is_valid(tmp_path: Path) -> None:
    invoke("new", tmp_path)
    path = tmp_path / "policy.toml"
    lines = path.read_text().splitlines()
    path.write_text(
        "\n".join(line.removeprefix("# ") if "=" in line or line.startswith("# [") else line for line in lines)
    )
    policy = PolicyFile(path).policy
    assert policy is not None
    assert (policy.approval, policy.metrics_only, policy.rounds_per_day) == ("each_run", True, 24)
    assert (policy.time_zone, policy.hours.begin, policy.hours.end) == ("Europe/Berlin", "20:00", "06:00")


def test_a_run_may_go_back_once_when_its_site_says_so(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = StateDirectory(state)
    memory = Memory(held.seen)
    for run_id in ("digits-1", "digits-2"):
        memory.note(RunId(run_id), Seen(7, RoundId(3)))
    memory.save()
    command = ("site", "accept-rollback", "digits-1", "--state", state)
    monkeypatch.setattr(site, "TAKEN_S", 0.1)  # it holds its directory, and is stopped
    waits = invoke(*command)
    assert waits.exit_code == 0
    assert "the agent has not applied this within 0.1 s" in waits.stderr
    with closing(PolicyHistory(state)) as history:
        assert history.accepted_rollbacks() == ["digits-1"]
    held.close()
    assert said(*command) == "the next round and version of run digits-1 are accepted as its newest\n"
    assert refused(*command) == [
        "this site has seen nothing of run 'digits-1': did you mean digits-2? (known: digits-2)"
    ]
    assert Memory(held.seen).runs() == {"digits-2": Seen(7, RoundId(3))}


def test_a_site_s_decisions_are_archived_beside_its_agent(state: Path, tmp_path: Path) -> None:
    log = DecisionLog(state, lambda: 1_777_896_000.0)
    log.write(ASKS, ALLOWED)
    said_of_it = said("site", "archive", "--out", tmp_path / "old", "--state", state)
    assert said_of_it.startswith("lines 0 to 1 (")
    log.write(replace(ASKS, number=2), ALLOWED)
    log.close()
    files = sorted((state / "decisions").glob("audit-*.jsonl"))
    across = json.loads(invoke("audit", "verify", "--archive", tmp_path / "old", *files, "--json").stdout)
    assert (across["first"], across["events"], across["num_faults"]) == (0, 3, 0)
    alone = json.loads(invoke("audit", "verify", *files, "--json").stdout)
    assert (alone["first"], alone["num_faults"]) == (2, 0)
    assert alone["relies_on"]
