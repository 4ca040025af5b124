"""Examples whose noise the clients share, between real processes: the sum has it, once, and the site charges a step."""

import re
from pathlib import Path

import numpy as np
import pytest

from atoll.protocol.privacy.poisson_account import PoissonAccount
from atoll.tensors.safetensors_file import read
from benchmarks.sums_evidence import faults_of_promises, promises_of
from tests.federation.processes import federation
from tests.federation.quiet_task import SITES
from tests.waiting import BOUND_S

TASK = str(Path(__file__).with_name("quiet_task.py")) + ":task"
CLIP, Z, RATE, BATCH, HONEST, DELTA, ROUNDS = 2.0, 3.0, 0.5, 4.0, 3, 1e-2, 3
SHARED = {
    **{"name": "shared", "rounds": 40, "round__cohort_size": 5, "round__quorum": 4, "round__min_available": 5},
    **{"local__max_steps": 1, "aggregation__weighting": "uniform", "evaluation__server_every": 0, "round__linger": 20},
    **{"secure__clip_norm": CLIP, "secure__stage_timeout": 30, "round__failure_rest": 0.0, "secure__bits": 64},
    **{"privacy__unit": "example", "privacy__noise_by": "clients", "privacy__delta": DELTA, "privacy__clip_norm": CLIP},
    **{"privacy__sample_rate": RATE, "privacy__noise_multiplier": Z, "privacy__batch": BATCH},
    **{"privacy__epsilon": 1.001 * PoissonAccount(RATE, DELTA).epsilon_of(Z, ROUNDS), "coordinator__keep_versions": 9},
}


def model(it, version):
    path = it.state / "runs" / "shared-1" / "versions" / f"{version:06d}.safetensors"
    return read(path)["weight"].astype(np.float64)


@pytest.mark.long
@pytest.mark.slow
def test_the_sum_has_the_noise_of_one_step_and_a_killed_agent_changes_no_charge(tmp_path):
    policy = tmp_path / "policy.toml"
    budget = f'[[privacy.data]]\nname = "rows"\ntasks = ["*"]\nepsilon_max = 9.0\ndelta = {DELTA}\nunit = "example"\n'
    policy.write_text(f'tasks = ["*"]\nruns = ["*"]\n{budget}')
    with federation(tmp_path, task=TASK) as it:
        it.coordinator(**SHARED)
        for site in SITES[:-1]:
            it.agent(site, threads=1, policy=str(policy))
        it.agent("e", threads=1, environment={"ATOLL_CRASH_AT": "agent.masked"}).wait(BOUND_S)
        it.agent("e", threads=1)
        assert it.wait_for_end() == 0, it.log("coordinator")
        run, claim = it.show("run", "show", "shared-1"), it.show("privacy", "show", "shared-1")
        records = it.history().rounds("shared-1")
        moved = [model(it, number + 1) - model(it, number) for number in range(ROUNDS)]
        spent = re.findall(
            r"charged to rows: (1 step) .* noise by the clients; spent now epsilon ([\d.]+)", it.log("a")
        )
        assert faults_of_promises(promises_of(it.folder / "e")) == []
    assert run["cause"].startswith("the privacy budget is spent: epsilon"), run["cause"]
    assert run["version"] == ROUNDS
    for record, noise in zip(records, moved, strict=True):
        members = sum(row.fate == "reported" for row in record.clients.values())
        assert members >= 4
        assert record.charge.charges == record.charge.clients, "no sum is tried again with the same samples"
        expected = Z * CLIP / BATCH * (members / HONEST) ** 0.5 / 5
        assert noise.std() == pytest.approx(expected, rel=0.02)
    assert (claim["unit"], claim["noise_by"], claim["uses"], claim["honest_min"]) == (
        "example",
        "clients",
        ROUNDS,
        HONEST,
    )
    assert "the clients add the noise inside their secure sums" in claim["sentence"]
    assert len(spent) == ROUNDS
    if "loss distributions" in claim["accountant"]:
        assert float(spent[-1][1]) == pytest.approx(claim["epsilon"], rel=1e-4), "the site counts what the run counts"
