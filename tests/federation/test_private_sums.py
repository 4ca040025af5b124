"""Private sums of real processes: the agents add the noise, one is killed on the way, and no charge is refunded."""

import json
import signal

import numpy as np
import pytest

from atoll.protocol.privacy.gaussian import epsilon_of, mu_of
from atoll.tensors.safetensors_file import read
from benchmarks.sums_evidence import faults_of_promises, promises_of
from tests.cli.invoking import shown
from tests.federation.processes import federation
from tests.waiting import BOUND_S

PRIVATE = {
    **{"round__cohort_size": 5, "round__quorum": 4, "rounds": 3, "secure__stage_timeout": 120},
    **{"aggregation__weighting": "uniform", "secure__clip_norm": 300.0, "evaluation__server_every": 0},
    **{"privacy__clip_norm": 300.0, "privacy__epsilon": 8.0, "privacy__delta": 1e-5, "privacy__noise_by": "clients"},
}
SIZE, HONEST = 50_000, 3
BEFORE_KEYS = ("agent.charged:1", "agent.encoded:1", "agent.promised/joined:1")
STEPS = {
    "agent.masked": (4,),
    "round.entry/SharesRevealed:2": (5,),
    **dict.fromkeys(BEFORE_KEYS, (4, 5)),
    "agent.promised/signed:1": (5,),
    "agent.uploaded:1": (4, 5),
    **dict.fromkeys(("round.entry/SharesCame:5", "round.effect/AuditCharge:1", "round.entry/SumOpened:1"), (5,)),
    **dict.fromkeys(("aggregate.mid_fold:1", "aggregate.after_fold:1", "round.effect/Commit:1"), (5,)),
}
"""Members of the first sum, by the death.

An agent that dies before its keys are out may be in it, or come too late. One that has sent every byte may die before
the coordinator has checked them: its session is lost with its memory, and then it is in no sum.
"""

BUDGET = 'tasks = ["*"]\nruns = ["*"]\n[[privacy.data]]\nname = "d"\ntasks = ["*"]\nepsilon_max = 50\ndelta = 1e-6\n'


def model(it, version):
    return read(it.state / "runs" / "trouble-1" / "versions" / f"{version:06d}.safetensors")["w"].astype(np.float64)


@pytest.mark.slow
@pytest.mark.parametrize(
    "step", [pytest.param(step, marks=() if number < 2 else pytest.mark.long) for number, step in enumerate(STEPS)]
)
def test_the_agents_noise_is_in_the_sum_and_a_killed_process_changes_no_charge(tmp_path, step):
    """kill -9 of an agent before its masked update leaves, or of the coordinator in the middle of a session."""
    policy = tmp_path / "policy.toml"
    policy.write_text(f'{BUDGET}unit = "client"\n')
    with federation(tmp_path) as it:
        is_agent = step.startswith("agent")
        it.coordinator(**PRIVATE, environment={} if is_agent else {"ATOLL_CRASH_AT": step})
        for site in "abcd":
            it.agent(site)
        it.agent("e", policy=str(policy), environment={"ATOLL_CRASH_AT": step} if is_agent else {})
        dying = "e" if is_agent else "coordinator"
        assert it.running[dying].wait(BOUND_S) == -signal.SIGKILL, f"{dying} did not come to its step"
        if is_agent:
            it.agent("e", policy=str(policy))
        else:
            it.coordinator(**PRIVATE)
        assert it.wait_for_end() == 0
        records, guarantee = it.rounds(), it.show("privacy", "show", "trouble-1")
        told = str(it.show("round", "show", "1"))
        steps = [model(it, number + 1) - model(it, number) for number in range(3)]
        assert faults_of_promises(promises_of(it.folder / "e")) == []
        [budget] = shown("site", "budgets", "--state", it.folder / "e", "--policy", policy)["budgets"]
        logs = "".join(it.log(name) for name in ("coordinator", *"abcde"))
        secrets = [(it.folder / site / "noise.key").read_text().strip() for site in "abcde"]
    assert not any(secret in logs for secret in secrets)
    z = guarantee["noise_multiplier"]
    for record, moved in zip(records, steps, strict=True):
        members = sum(row.fate == "reported" for row in record.clients.values())
        assert members in (STEPS[step] if record.round_id == 1 else (5,))
        if step in BEFORE_KEYS:  # it may have come too late to be told its boxes
            assert record.charge.clients == record.charge.charges in {members, 5}
        else:
            assert (record.charge.clients, record.charge.charges) == (5, 5), "also the agent that was killed"
        expected = z * 300.0 * (members / HONEST) ** 0.5 / 5
        assert moved.std() == pytest.approx(expected, rel=0.02)
    assert budget["charges"] in (3, 4), "of each work once; of one that a kill has ended perhaps again"
    assert guarantee["uses"] == 3
    assert guarantee["epsilon"] == pytest.approx(epsilon_of(mu_of([(z, 3)]), 1e-5), rel=1e-9)
    assert "against the coordinator and 1 client that may work together with it" in guarantee["sentence"]
    assert f"Charged: {records[0].charge.clients} clients for a private sum" in told
    assert "loss" not in json.dumps(told), "no metric of the training is added"
