"""Encoded updates with error feedback, as a user runs them: killed anywhere, the model has the same bits."""

import signal
from pathlib import Path

import numpy as np
import pytest

from atoll.tensors.safetensors_file import read
from tests.federation.processes import federation
from tests.waiting import BOUND_S

DRIFTING = str(Path(__file__).with_name("drifting_task.py")) + ":task"
ROUNDS = 4


def model_after(folder, *, crash_at=None, **settings):
    """The bytes of the last version; `crash_at`: where one agent dies in its second round, to be started again."""
    folder.mkdir()
    with federation(folder, task=DRIFTING) as it:
        it.coordinator(rounds=ROUNDS, round__cohort_size=2, evaluation__server_every=0, **settings)
        it.agent("a")
        it.agent("b", environment={"ATOLL_CRASH_AT": f"{crash_at}:2"} if crash_at else {})
        if crash_at:
            assert it.running["b"].wait(BOUND_S) == -signal.SIGKILL
            it.agent("b")
        assert it.wait_for_end() == 0
        shown = it.show("round", "list")
        assert {line["bytes_saved"] > 150_000 for line in shown} == {True}
        return read(it.state / "runs" / "trouble-1" / "versions" / f"{ROUNDS:06d}.safetensors")["w"]


TOPK = {"aggregation__codec": "topk", "aggregation__topk_fraction": 0.01}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return model_after(tmp_path_factory.mktemp("undisturbed") / "it", **TOPK)


def test_what_is_left_out_comes_later(undisturbed):
    assert 0.01 < (undisturbed != 0).mean() <= 2 * ROUNDS * 0.0101
    assert np.abs(undisturbed).max() > 1


@pytest.mark.parametrize(
    "step",
    ["agent.spooled", *(pytest.param(step, marks=pytest.mark.long) for step in ("agent.answered", "agent.settled"))],
)
def test_model_has_the_same_bits_when_an_agent_is_killed(tmp_path, undisturbed, step):
    assert model_after(tmp_path / "it", crash_at=step, **TOPK).tobytes() == undisturbed.tobytes()
