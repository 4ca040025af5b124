"""The encoded updates of a real agent process: sent values and residual add up, wherever it is killed."""

import signal

import numpy as np
import pytest

from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.manifest import parse_update
from atoll.tensors.codecs.names import FAMILIES
from atoll.tensors.safetensors_file import read
from tests.client.fake_coordinator import Instant, Version, agent, lagoon, live, model, until
from tests.client.test_process import Process
from tests.tensors.encoded_by_hand import decoded

SIZE = 5000
UPDATE = np.random.default_rng(1).standard_normal(SIZE, np.float32)
"""Update of the wide task in every round."""


def value_of(coordinator, digest):
    """Decode an update that the coordinator has received."""
    uploads = [parse_update(opened.manifest) for opened in coordinator.opened if isinstance(opened, pb.UploadOpen)]
    [piece] = next(manifest for manifest in uploads if manifest.digest == digest).pieces
    data = bytes(coordinator.received[digest])
    return decoded(piece.codec, data, SIZE) if piece.codec else np.frombuffer(data, np.float32)


def owed(state):
    files = list((state / "kept").glob("residual.*.safetensors"))
    return sum((read(path)["w"].astype(np.float64) for path in files), np.zeros(SIZE))


async def answered(coordinator, state, count):
    """Wait until the agent has processed `count` answers."""
    await until(lambda: len(coordinator.verdicts) == count and not list((state / "spool").iterdir()))


@pytest.mark.parametrize("codec", ["sign", "topk:0.01"])
@live
async def test_sent_and_owed_add_up_to_what_was_trained(tmp_path, codec):
    async with lagoon() as coordinator, Process(coordinator, tmp_path / "a"):
        version = coordinator.add(Version(model(w=SIZE)))
        for number in range(1, 4):
            await coordinator.invite(version, task="wide_task:task", round_id=number, codec=codec)
            await answered(coordinator, tmp_path / "a", number)
            sent = sum(value_of(coordinator, digest).astype(np.float64) for digest in coordinator.verdicts)
            np.testing.assert_allclose(sent + owed(tmp_path / "a"), number * UPDATE, atol=1e-5)
        assert np.linalg.norm(owed(tmp_path / "a")) > 1
        assert coordinator.received_bytes < SIZE
        await coordinator.push(run_ended=pb.RunEnded(run_id="run-1", state="finished"))
        await until(lambda: not list((tmp_path / "a" / "kept").iterdir()))


@live
async def test_what_a_refused_update_left_out_is_not_owed(tmp_path):
    async with lagoon() as coordinator, Process(coordinator, tmp_path / "a"):
        version = coordinator.add(Version(model(w=SIZE)))
        await coordinator.invite(version, task="wide_task:task", codec="sign")
        await answered(coordinator, tmp_path / "a", 1)
        before = owed(tmp_path / "a")
        coordinator.verdict = pb.Verdict(accepted=False, reason="too_late")
        await coordinator.invite(version, task="wide_task:task", round_id=2, codec="sign")
        await answered(coordinator, tmp_path / "a", 2)
        assert np.array_equal(owed(tmp_path / "a"), before)
        assert not list((tmp_path / "a" / "kept").glob("*.staged"))


@pytest.mark.parametrize(
    "step", ["agent.trained", "agent.spooled", "agent.uploaded", "agent.answered", "agent.settled"], ids=str
)
def test_agent_killed_in_its_second_round_owes_what_it_should(tmp_path, step):
    @live
    async def scenario():
        async with lagoon() as coordinator:
            version = coordinator.add(Version(model(w=SIZE)))
            async with Process(coordinator, tmp_path / "a", ATOLL_CRASH_AT=f"{step}:2") as process:
                await coordinator.invite(version, task="wide_task:task", codec="sign")
                await answered(coordinator, tmp_path / "a", 1)
                await coordinator.invite(version, task="wide_task:task", round_id=2, codec="sign")
                assert await process.ended() == -signal.SIGKILL
            coordinator.answers.clear()  # a real coordinator does not invite again a client that it has answered
            async with Process(coordinator, tmp_path / "a") as process:
                await coordinator.connected(2)
                await coordinator.invite(version, task="wide_task:task", round_id=2, codec="sign")
                await until(lambda: process.log.count("invited to round 2") == 2)
                coordinator.answers.set()
                await answered(coordinator, tmp_path / "a", 2)
                assert len(coordinator.received) == 2, "one update for each round, with the same bytes"
                await coordinator.invite(version, task="wide_task:task", round_id=3, codec="sign")
                await answered(coordinator, tmp_path / "a", 3)
            sent = sum(value_of(coordinator, digest).astype(np.float64) for digest in coordinator.verdicts)
            np.testing.assert_allclose(sent + owed(tmp_path / "a"), 3 * UPDATE, atol=1e-5)
            assert len(list((tmp_path / "a" / "kept").iterdir())) == 1

    scenario()


@live
async def test_agent_says_what_it_speaks_and_sends_plain_when_asked_for_something_else(tmp_path, caplog):
    runner = Instant()
    async with lagoon() as coordinator, agent(coordinator, tmp_path / "a", runner):
        await coordinator.connected()
        assert tuple(coordinator.hellos[0].codecs) == FAMILIES
        await coordinator.invite(coordinator.add(Version(model())), codec="zip:9")
        await coordinator.accepted.wait()
        assert runner.orders[0].codec == ""
        assert "will be sent without a codec: codec 'zip:9' is not one of" in caplog.text
        coordinator.accepted.clear()
        await coordinator.invite(coordinator.add(Version(model())), round_id=2, codec="bf16")
        await coordinator.accepted.wait()
        assert runner.orders[1].codec == "bf16", "this runner cannot encode, and its plain update is taken"
        assert parse_update(coordinator.opened[-1].manifest).codecs == frozenset()


@live
async def test_update_begun_while_another_is_unanswered_feeds_back_nothing_twice(tmp_path):
    async with lagoon() as coordinator, Process(coordinator, tmp_path / "a"):
        version, state = coordinator.add(Version(model(w=SIZE))), tmp_path / "a"
        await coordinator.invite(version, task="wide_task:task", codec="sign")
        await answered(coordinator, state, 1)
        coordinator.lose_verdicts = 10**6  # received, and never answered
        await coordinator.invite(version, task="wide_task:task", round_id=2, codec="sign")
        await until(lambda: len(coordinator.verdicts) == 2)
        await coordinator.invite(version, task="wide_task:task", round_id=3, codec="sign")
        await until(lambda: len(coordinator.verdicts) == 3)
        coordinator.lose_verdicts = 0
        await answered(coordinator, state, 3)
        sent = sum(value_of(coordinator, digest).astype(np.float64) for digest in coordinator.verdicts)
        np.testing.assert_allclose(sent + owed(state), 3 * UPDATE, atol=1e-5)
