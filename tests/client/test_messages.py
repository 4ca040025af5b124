"""A message of a server program at a site: from the invitation to the reply that the coordinator receives."""

import numpy as np
import pytest

from atoll.client.crew_config import CrewConfig
from atoll.client.disk.state_directory import StateDirectory
from atoll.client.work.runner import MessageOrder, RunnerFailed, Training
from atoll.client.work.worker import WorkerRunner, workers_of
from atoll.protocol.manifest import parse_update
from atoll.task.content import Content, from_tensors, to_tensors
from atoll.tensors.safetensors_file import mapped, read, write
from tests.client.fake_coordinator import Instant, Version, agent, lagoon, live, until
from tests.client.work import message_task

MESSAGE = Content({"lr": 0.5}, {"w": np.arange(3.0), "flag": np.array([True])})


class Replying(Instant):
    """A runner in this process that returns each message, with its kind."""

    async def message(self, order):
        self.orders.append(order)
        content = from_tensors(mapped(order.message))
        pieces = write(order.out, to_tensors(Content(order.kind, content.arrays)))
        return Training(pieces=pieces, num_examples=1, work=1.0, statistics={}, seconds=0.1)


@live
async def test_a_message_is_answered_and_its_reply_uploaded(tmp_path, caplog):
    caplog.set_level("INFO")
    async with lagoon() as coordinator, agent(coordinator, tmp_path, runner := Replying()):
        version = coordinator.add(Version(to_tensors(MESSAGE)))
        await coordinator.invite(version, round_id=7, message="query.stats", group="3")
        await coordinator.accepted.wait()
        assert coordinator.hellos[0].takes_messages
        (order,) = runner.orders
        assert (order.kind, order.group, order.round_id, order.seed) == ("query.stats", "3", 7, 7)
        manifest = parse_update(coordinator.opened[-1].manifest)
        assert (manifest.round_id, manifest.base_digest) == (7, version.digest)
        received, at, tensors = bytes(coordinator.received[manifest.digest]), 0, {}
        for piece in manifest.pieces:
            tensors[piece.tensor] = np.frombuffer(received, np.uint8, piece.num_bytes, at)
            at += piece.num_bytes
        reply = from_tensors(tensors)
        assert reply.plain == "query.stats"
        np.testing.assert_array_equal(reply.arrays["w"], np.arange(3.0))
        await until(lambda: "answered message 7 (query.stats)" in caplog.text)


@live
async def test_a_mesh_is_asked_no_messages(tmp_path):
    async with lagoon() as coordinator, agent(coordinator, tmp_path, Replying(), crew=CrewConfig(mesh="dp=2")):
        await until(lambda: coordinator.hellos)
        assert not coordinator.hellos[0].takes_messages


@live
async def test_the_site_decides_which_messages_it_answers(tmp_path):
    policy = tmp_path / "policy.toml"
    policy.write_text('tasks = ["*"]\nruns = ["*"]\nmetrics = "per_site"\nactions = ["train"]\n')
    async with lagoon() as coordinator, agent(coordinator, tmp_path, Replying(), policy=policy):
        version = coordinator.add(Version(to_tensors(MESSAGE)))
        await coordinator.invite(version, round_id=1, message="query.stats")
        failed = await coordinator.heard("failed")
        assert (failed.round_id, failed.reason) == (1, "policy_refused")
        assert "actions" in failed.detail
        await coordinator.invite(version, round_id=2, message="train")
        await coordinator.accepted.wait()


@live
async def test_a_worker_answers_with_the_message_of_its_task(tmp_path):
    state = StateDirectory(tmp_path / "state")
    write(tmp_path / "message", to_tensors(MESSAGE))
    task = f"{message_task.__file__}:task"
    tasks = {"answering": task}
    running = WorkerRunner(tasks, workers_of(tasks, site="south", state=state), state=state, lease=5.0)

    async def ask(kind):
        order = MessageOrder(
            task="answering",
            kind=kind,
            group="1",
            message=tmp_path / "message",
            out=state.work / "reply",
            round_id=1,
            seed=3,
            local={},
            own_out=state.work / "own",
            budget=30.0,
        )
        return await running.message(order)

    try:
        trained = await ask("train")
        reply = from_tensors(read(state.work / "reply"))
        assert reply.plain == {"site": "south", "kind": "train", "num-examples": 2, "echo": {"lr": 0.5}}
        np.testing.assert_array_equal(reply.arrays["w"], np.arange(3.0) + 2)
        assert {piece.dtype for piece in trained.pieces} == {"U8"}
        for kind, reason, words in (
            ("query.fail", "training_failed", "south has no answer"),
            ("query.odd", "task_broken", "must return a Content, got str"),
        ):
            with pytest.raises(RunnerFailed, match=words) as caught:
                await ask(kind)
            assert caught.value.reason == reason
    finally:
        await running.close()
        state.close()
