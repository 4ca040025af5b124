"""The agent as a process: killed, stopped, restarted."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from atoll.client.process import tasks_by_name
from atoll.protocol.settings import ConfigError
from tests.client.fake_coordinator import MIB, Version, lagoon, live, model
from tests.waiting import BOUND_S

WIDE = Path(__file__).with_name("wide_task.py")
ROOT = Path(__file__).parents[2]


class Process:
    """An agent of the wide task in a process of its own."""

    def __init__(self, coordinator, state, **environment):
        self._command = [sys.executable, "-m", "tests.client.agent_process"]
        self._command += [coordinator.address, str(state), f"{WIDE}:task"]
        self._environment, self._log = os.environ | environment, state.with_suffix(".log")

    async def __aenter__(self):
        with self._log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *self._command, stderr=log, stdout=log, env=self._environment, cwd=ROOT
            )
        return self

    async def __aexit__(self, *error):
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()

    async def ended(self):
        async with asyncio.timeout(BOUND_S):
            return await self.process.wait()

    @property
    def log(self):
        return self._log.read_text()


def wide():
    return Version(model(w=8 * MIB))


@live
async def test_killed_agent_goes_on_where_its_upload_stopped(tmp_path):
    async with lagoon() as coordinator:
        version = coordinator.add(wide())
        async with Process(coordinator, tmp_path / "a", ATOLL_CRASH_AT="agent.uploading:20") as agent:
            await coordinator.invite(version, task="wide_task:task")
            assert await agent.ended() == -signal.SIGKILL
        async with Process(coordinator, tmp_path / "a"):
            await coordinator.accepted.wait()
        assert coordinator.received_bytes - 32 * MIB <= 8 * MIB
        assert [work.round_id for work in coordinator.hellos[-1].working_on] == [1]


@live
async def test_killed_agent_goes_on_where_its_download_stopped(tmp_path):
    async with lagoon() as coordinator:
        version = coordinator.add(wide())
        async with Process(coordinator, tmp_path / "a", ATOLL_CRASH_AT="agent.downloading:20") as agent:
            await coordinator.invite(version, task="wide_task:task")
            assert await agent.ended() == -signal.SIGKILL
        async with Process(coordinator, tmp_path / "a"):
            await coordinator.connected(2)
            await coordinator.invite(version, task="wide_task:task")
            await coordinator.accepted.wait()
        assert coordinator.opened[1].position == 20 * MIB
        assert coordinator.sent_bytes - 32 * MIB <= 8 * MIB


@live
async def test_an_agent_keeps_two_versions_and_deletes_older_ones_while_it_works(tmp_path):
    versions = [Version({"w": np.full(MIB, seed, np.float32)}) for seed in range(5)]
    async with lagoon() as coordinator, Process(coordinator, tmp_path / "a"):
        for round_id, version in enumerate(versions, 1):
            coordinator.accepted.clear()
            await coordinator.invite(coordinator.add(version), round_id=round_id, task="wide_task:task")
            await coordinator.accepted.wait()
        models = tmp_path / "a" / "models"
        last_two = {f"{version.digest}.safetensors" for version in versions[-2:]}
        async with asyncio.timeout(BOUND_S):
            while {path.name for path in models.iterdir()} != last_two:
                await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    "step",
    ["agent.invited", "agent.downloaded", "agent.training", "agent.trained", "agent.spooled", "agent.answered"],
)
def test_agent_killed_anywhere_still_delivers_one_update(tmp_path, step):
    @live
    async def scenario():
        async with lagoon() as coordinator:
            version = coordinator.add(Version(model(w=8)))
            async with Process(coordinator, tmp_path / "a", ATOLL_CRASH_AT=step) as agent:
                await coordinator.invite(version, task="wide_task:task")
                assert await agent.ended() == -signal.SIGKILL
            coordinator.accepted.clear()
            async with Process(coordinator, tmp_path / "a"):
                await coordinator.connected(2)
                await coordinator.invite(  # as the real one does
                    version, task="wide_task:task"
                )  # as the real one does to a client that comes back
                await coordinator.accepted.wait()
            assert len(coordinator.received) == 1

    scenario()


@live
async def test_sigterm_ends_the_agent_orderly_and_soon(tmp_path):
    async with lagoon() as coordinator, Process(coordinator, tmp_path / "a") as agent:
        await coordinator.connected()
        await coordinator.invite(coordinator.add(Version(model(w=8))), task="wide_task:task", local='{"sleep": 600}')
        while "downloading" not in agent.log:
            await asyncio.sleep(0.01)
        began = time.monotonic()
        agent.process.terminate()
        assert await agent.ended() == 0
        assert time.monotonic() - began < BOUND_S
        await coordinator.heard("goodbye")
        assert "Traceback" not in agent.log


@live
async def test_sigterm_ends_the_agent_also_without_a_coordinator(tmp_path):
    async with lagoon() as coordinator:
        await coordinator.server.stop(0)
        async with Process(coordinator, tmp_path / "a") as agent:
            while not agent._log.exists() or "no connection" not in agent.log:
                await asyncio.sleep(0.01)
            agent.process.terminate()
            assert await agent.ended() == 0


def test_tasks_have_the_names_that_coordinators_know():
    assert tasks_by_name(["a/b.py:task", "pkg.mod:other"]) == {
        "b:task": "a/b.py:task",
        "pkg.mod:other": "pkg.mod:other",
    }
    with pytest.raises(ConfigError, match="one name, b:task"):
        tasks_by_name(["a/b.py:task", "c/b.py:task"])
    with pytest.raises(ConfigError):
        tasks_by_name(["nonsense"])
