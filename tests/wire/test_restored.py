"""A coordinator whose state was put back from a backup, and an agent that remembers what came after it."""

import asyncio
import shutil
import subprocess
import sys
from contextlib import asynccontextmanager

import numpy as np

from atoll.client.config import AgentConfig
from atoll.client.policy.history import PolicyHistory
from atoll.client.process import run_agent
from atoll.protocol.identity.names import Identity, Role
from benchmarks.members import equip
from tests.client.fake_coordinator import Instant, until
from tests.wire.live_coordinator import running
from tests.wire.test_round import committed, live

SETTINGS = {"coordinator__insecure": False, "round__cohort_size": 1, "round__retry": 1000, "pause": 0.05, "rounds": 9}


class Some(Instant):
    """A runner that trains for `count` rounds, and then without end."""

    def __init__(self, count):
        super().__init__({"w": np.ones(4, np.float32), "count": np.ones((), np.int64)})
        self.count = count

    async def train(self, order):
        self.count -= 1
        if self.count < 0:
            await asyncio.get_running_loop().create_future()
        return await super().train(order)


@asynccontextmanager
async def at_work(it, folder, runner):
    """An agent of the site a, in this process."""
    equip(it.coordinator.config.state, folder, Identity(Role.CLIENT, "a"))
    config = AgentConfig(site="a", state=folder, coordinator=it.address, reconnect_min=0.01, reconnect_max=0.1)
    task = asyncio.ensure_future(
        run_agent(config, {"four_numbers_task:task": "x:task"}, runner=runner, handle_signals=False)
    )
    try:
        yield
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.wait({task})


def fates(it):
    """Return the outcomes of the site a's invitations: their reasons, by round."""
    records = it.run.machine.newest_first()
    return {record.round_id: record.clients["a"].reason for record in records if "a" in record.clients}


@live
async def test_it_is_refused_until_the_sites_operator_accepts_it_beside_the_running_agent(tmp_path):
    state, folder, backup = tmp_path / "state", tmp_path / "agent", tmp_path / "backup"
    async with running(state, **SETTINGS) as it, at_work(it, folder, Some(1)):
        await committed(it, 1)
    shutil.copytree(state, backup)
    async with running(state, **SETTINGS) as it, at_work(it, folder, Some(2)):
        await committed(it, 3)
    shutil.rmtree(state)
    shutil.copytree(backup, state)
    async with running(state, **SETTINGS) as it:
        async with at_work(it, folder, runner := Some(9)):
            await until(lambda: "rollback" in fates(it).values())
            assert it.run.machine.ledger.version == 1
            assert runner.orders == []
            name = str(it.run.run_id).rpartition("-")[0]
            command = [sys.executable, "-m", "atoll", "site", "accept-rollback", name, "--state", str(folder)]
            said = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
            assert said.returncode == 0, said.stderr
            assert f"version of run {it.run.run_id} are accepted as its newest" in said.stdout
            assert "has not applied" not in said.stderr
            await committed(it, 2)
            assert PolicyHistory(folder).accepted_rollbacks() == []
