"""What only the coordinator or the task tells about a run with secure sums is refused before the run begins."""

from pathlib import Path

import pytest

from atoll.server.errors import OperatorError
from tests.cli.invoking import refused
from tests.wire.live_coordinator import running
from tests.wire.test_round import live

SECURE = {"round__cohort_size": 3, "secure__clip_norm": 1.0, "secure__examples_max": 10}
WITH_KEYS = {**SECURE, "coordinator__insecure": False}
SHARED = str(Path(__file__).parent / "tasks" / "shared_tensors_task.py") + ":task"


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        (
            SECURE,
            "secure: this coordinator is --insecure, and the keys of a secure sum need certificates; allowed: a "
            "coordinator without --insecure",
        ),
        (  # w: 4 words of 4 bytes; secure/exact: 4 canaries, 3 of the member, 2 of w, 2 of count, 3 of the loss
            {**WITH_KEYS, "coordinator__incoming_max": 127},
            "coordinator.incoming_max is 127: an update of this model has 128 bytes; allowed: 0 (no limit), or at "
            "least this number",
        ),
        (
            {**WITH_KEYS, "task": SHARED},
            "task: its algorithm sends 1 tensor beside the model (algorithm/drift), and with [secure] only the model's "
            "add up: allowed is an algorithm without shared tensors",
        ),
    ],
    ids=["no certificates", "the quota", "shared tensors"],
)
@live
async def test_a_coordinator_refuses_what_secure_sums_cannot_add(tmp_path, settings, fault):
    with pytest.raises(OperatorError) as caught:
        async with running(tmp_path / "state", **settings):
            pass
    assert str(caught.value) == fault


def test_a_check_refuses_secure_sums_without_certificates_as_the_start_does(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(f"""
        task = '{SHARED}'
        round = {{cohort_size = 3}}
        secure = {{clip_norm = 1.0, examples_max = 10}}
        coordinator = {{state = '{tmp_path / "state"}'}}
    """)
    assert "secure: this coordinator is --insecure" in str(refused("coordinator", file, "--insecure", "--check"))
