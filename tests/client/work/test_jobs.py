"""The jobs of an agent that is stopped."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atoll.client.session.events import Invitation
from atoll.client.work.jobs import Jobs
from tests.client.fake_coordinator import Instant


class StoppedAtOnce(Instant):
    """A runner whose training never ends, and whose job is cancelled as soon as the training has begun."""

    async def train(self, order: Any) -> Any:
        self.training = asyncio.current_task()
        self.job.cancel()
        self.go.clear()
        return await super().train(order)


async def is_left_behind(folder: Path) -> bool:
    runner = StoppedAtOnce()
    state = SimpleNamespace(find=lambda *_: None)
    models = SimpleNamespace(path=lambda digest: folder / digest)
    stores: Any = SimpleNamespace(spool=None, models=models, residuals=None, client_state=state, work=folder)
    jobs = Jobs("north", stores, runner, None, save_seen=lambda: None)  # type: ignore[arg-type]
    invitation: Any = Invitation(run_id="run", round_id=1, task="t", base_version=0, model_digest="m", time_left=9.0)
    runner.job = asyncio.ensure_future(jobs.train(invitation, 9.0))
    with pytest.raises(asyncio.CancelledError):
        await runner.job
    for _ in range(3):
        await asyncio.sleep(0)
    return not runner.training.cancelled()


def test_a_job_that_is_stopped_as_it_begins_leaves_no_training_behind(tmp_path: Path) -> None:
    """Its error, when the worker is killed, would be in the agent's log with a traceback."""
    assert not asyncio.run(is_left_behind(tmp_path))
