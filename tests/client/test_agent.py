"""The agent against a scripted coordinator: session, connection and spool are real, the runner is in this process."""

import logging
import socket
import time

import grpc
import numpy as np
import pytest

from atoll.client.work.runner import RunnerFailed
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.manifest import parse_update
from atoll.protocol.settings import ConfigError
from atoll.protocol.vocabulary import FailureReason
from tests.client.fake_coordinator import Instant, Version, agent, lagoon, live, model, until


def spooled(state):
    return sorted(path.name for path in (state / "spool").iterdir())


@live
async def test_round_from_invitation_to_verdict(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    async with lagoon() as coordinator, agent(coordinator, tmp_path, runner := Instant(), label="dry"):
        version = coordinator.add(Version(model()))
        await coordinator.invite(version, local='{"lr": 0.5}')
        await coordinator.accepted.wait()
        await until(lambda: spooled(tmp_path) == [])
        hello, opened = coordinator.hellos[0], coordinator.opened[-1]
        assert (hello.client_id, hello.num_examples, hello.label, list(hello.tasks)) == (
            "north",
            10,
            "dry",
            ["tiny:task"],
        )
        manifest = parse_update(opened.manifest)
        assert (manifest.run_id, manifest.round_id, manifest.client_id) == ("run-1", 1, "north")
        assert (manifest.base_version, manifest.base_digest) == (0, version.digest)
        assert (manifest.num_examples, manifest.work) == (10, 1.0)
        assert bytes(coordinator.received[manifest.digest]) == np.ones(4, np.float32).tobytes()
        assert opened.statistics["loss"].values == [2.0, 10.0]
        assert opened.train_seconds == 0.25
        assert 0 < opened.download_seconds < 5
        (order,) = runner.orders
        assert (order.seed, order.local, order.round_id) == (7, {"lr": 0.5}, 1)
        assert coordinator.calls == {"Session": 1, "Download": 1, "Upload": 1}  # and no round trip more
    for step in ("connected", "invited to round 1", "downloading 16 B", "trained 10 examples", "accepted"):
        assert step in caplog.text
    assert "no longer wanted" not in caplog.text


@live
async def test_agent_says_goodbye_when_it_is_stopped(tmp_path):
    async with lagoon() as coordinator, agent(coordinator, tmp_path, runner := Instant()) as task:
        await coordinator.connected()
        await until(lambda: coordinator.pushes is not None)
        await coordinator.push(run_ended=pb.RunEnded(run_id="other", state="finished"))
        assert not task.done()
    async with lagoon() as coordinator, agent(coordinator, tmp_path, runner, exit_when_done=True) as task:
        await coordinator.push(run_ended=pb.RunEnded(run_id="run-1", state="finished"))
        assert await task == 0
        await coordinator.heard("goodbye")
        assert "close" in runner.calls


@live
async def test_agent_ends_with_the_run_only_when_its_updates_are_answered(tmp_path):
    async with lagoon() as coordinator, agent(coordinator, tmp_path, exit_when_done=True) as task:
        coordinator.lose_verdicts = 2
        version = coordinator.add(Version(model()))
        await coordinator.invite(version)
        await until(lambda: coordinator.calls["Upload"] >= 1)
        await coordinator.push(run_ended=pb.RunEnded(run_id="another", state="finished"))
        assert await task == 0
        assert coordinator.calls["Upload"] == 3
    assert spooled(tmp_path) == []


@live
async def test_lost_verdict_is_asked_for_again_and_no_byte_travels_twice(tmp_path):
    async with lagoon() as coordinator, agent(coordinator, tmp_path):
        coordinator.lose_verdicts = 3
        await coordinator.invite(coordinator.add(Version(model())))
        await until(lambda: spooled(tmp_path) == [] and coordinator.calls["Upload"] == 4)
        assert coordinator.received_bytes == 16


@live
async def test_refused_update_is_dropped(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    async with lagoon() as coordinator, agent(coordinator, tmp_path):
        coordinator.verdict = pb.Verdict(reason="too_late", detail="round 1 is over")
        await coordinator.invite(coordinator.add(Version(model())))
        await coordinator.accepted.wait()
        await until(lambda: spooled(tmp_path) == [])
    assert "refused: too_late: round 1 is over" in caplog.text
    assert "no longer wanted" not in caplog.text


@live
async def test_update_that_is_damaged_on_the_way_is_sent_again_and_then_given_up(tmp_path):
    async with lagoon() as coordinator, agent(coordinator, tmp_path):
        coordinator.verdict = pb.Verdict(reason="digest_mismatch", resend=True)
        await coordinator.invite(coordinator.add(Version(model())))
        failed = await coordinator.heard("failed")
        assert failed.reason == "upload_failed"
        assert coordinator.calls["Upload"] == 4
        assert coordinator.received_bytes == 4 * 16


@live
async def test_update_that_the_coordinator_cannot_understand_is_given_up(tmp_path, caplog):
    async with lagoon() as coordinator, agent(coordinator, tmp_path):
        coordinator.upload_status = (grpc.StatusCode.INVALID_ARGUMENT, "nonsense")
        await coordinator.invite(coordinator.add(Version(model())))
        failed = await coordinator.heard("failed")
        assert (failed.reason, failed.round_id) == ("upload_failed", 1)
        await until(lambda: spooled(tmp_path) == [])
    assert "nonsense" in caplog.text


@live
async def test_full_coordinator_is_asked_again_later(tmp_path):
    async with lagoon() as coordinator, agent(coordinator, tmp_path):
        coordinator.upload_status = (grpc.StatusCode.RESOURCE_EXHAUSTED, "cannot be stored now")
        await coordinator.invite(coordinator.add(Version(model())))
        await until(lambda: coordinator.calls["Upload"] >= 2)
        coordinator.upload_status = None
        await coordinator.accepted.wait()


@live
async def test_update_of_an_earlier_process_is_sent_and_told_in_hello(tmp_path):
    async with lagoon() as coordinator:
        async with agent(coordinator, tmp_path):
            coordinator.upload_status = (grpc.StatusCode.UNAVAILABLE, "not now")
            await coordinator.invite(coordinator.add(Version(model())))
            await until(lambda: coordinator.calls["Upload"] >= 1)
        assert spooled(tmp_path) == ["run-1.1.update"]
        coordinator.upload_status = None
        async with agent(coordinator, tmp_path, runner := Instant()):
            await coordinator.accepted.wait()
            await until(lambda: spooled(tmp_path) == [])
        assert [(work.run_id, work.round_id) for work in coordinator.hellos[-1].working_on] == [("run-1", 1)]
        assert runner.orders == []


@live
async def test_agent_survives_a_restart_of_the_coordinator_while_it_trains(tmp_path):
    runner, version = Instant(), Version(model())
    runner.go.clear()
    async with lagoon() as coordinator:
        port = coordinator.port
        async with agent(coordinator, tmp_path, runner):
            coordinator.add(version)
            await coordinator.invite(version)
            await runner.begun.wait()
            await coordinator.server.stop(0)
            async with lagoon(port) as reborn:
                await reborn.connected()
                assert [work.round_id for work in reborn.hellos[0].working_on] == [1]
                runner.go.set()
                await reborn.accepted.wait()
                assert len(runner.orders) == 1


@live
async def test_download_survives_a_restart_of_the_coordinator(tmp_path):
    version = Version(model(w=2**20))
    async with lagoon() as coordinator:
        port = coordinator.port
        async with agent(coordinator, tmp_path):
            coordinator.add(version)
            coordinator.download_cuts = [2**20] * 100
            await coordinator.invite(version)
            await until(lambda: coordinator.calls["Download"] >= 1)
            await coordinator.server.stop(0)
            async with lagoon(port) as reborn:
                reborn.add(version)
                await reborn.accepted.wait()


@live
async def test_replaced_agent_waits_and_says_why(tmp_path, caplog):
    async with lagoon() as coordinator, agent(coordinator, tmp_path, reconnect_max=0.6):
        await coordinator.connected()
        await until(lambda: coordinator.pushes is not None)
        begun = time.monotonic()
        coordinator.pushes.put_nowait((grpc.StatusCode.ABORTED, "replaced by a newer connection of north"))
        await coordinator.connected(2)
        assert time.monotonic() - begun >= 0.3, "the first wait is 0.3 s to 0.6 s"
    assert "another agent uses this site's name" in caplog.text


@live
async def test_a_refused_agent_waits_ever_longer_and_tells_fewer_of_the_times(tmp_path, caplog):
    async with lagoon() as coordinator:
        why = "the process at 10.0.0.1:4711 has the place of client north"
        coordinator.session_status = (grpc.StatusCode.ALREADY_EXISTS, why)
        async with agent(coordinator, tmp_path, reconnect_min=0.01, reconnect_max=0.05):
            await coordinator.connected(3)
            assert len({hello.process for hello in coordinator.hellos}) == 1
            assert coordinator.hellos[0].folder
            coordinator.session_status = None
            await until(lambda: coordinator.pushes is not None)
    told = [record for record in caplog.records if why in record.getMessage() and record.levelno == logging.WARNING]
    assert len(told) == 2, "the first time and the second, not the third"


@live
async def test_agent_that_is_refused_keeps_trying_and_complains_once(tmp_path, caplog):
    async with lagoon() as coordinator:
        coordinator.session_status = (grpc.StatusCode.FAILED_PRECONDITION, "protocol 1 is not 2")
        async with agent(coordinator, tmp_path):
            await coordinator.connected(4)
    assert caplog.text.count("protocol 1 is not 2") == 1


@live
async def test_damaged_piece_is_fetched_again_and_given_up_after_three_times(tmp_path):
    async with lagoon() as coordinator, agent(coordinator, tmp_path):
        version = coordinator.add(Version(model(a=10, b=10, c=10)))
        coordinator.damage["b"] = 2
        await coordinator.invite(version)
        await coordinator.accepted.wait()
        assert coordinator.calls["Download"] == 3
        other = coordinator.add(Version(model(1, a=10, b=10, c=10)))
        coordinator.damage["b"] = 9
        await coordinator.invite(other, round_id=2)
        failed = await coordinator.heard("failed")
        assert failed.reason == "download_failed"
        assert "'b'" in failed.detail


@live
async def test_large_manifest_is_fetched_and_a_wrong_one_is_refused(tmp_path):
    async with lagoon() as coordinator, agent(coordinator, tmp_path):
        version, other = coordinator.add(Version(model())), Version(model(1))
        await coordinator.invite(version, inline=False)
        await coordinator.accepted.wait()
        assert coordinator.calls["GetManifest"] == 1
        coordinator.versions[other.digest] = version
        await coordinator.invite(other, round_id=2, inline=False)
        assert (await coordinator.heard("failed")).reason == "download_failed"


@live
async def test_version_that_is_here_already_is_not_fetched(tmp_path):
    async with lagoon() as coordinator, agent(coordinator, tmp_path):
        version = coordinator.add(Version(model()))
        for round_id in (1, 2, 3):
            coordinator.accepted.clear()
            await coordinator.invite(version, round_id=round_id)
            await coordinator.accepted.wait()
        assert coordinator.calls["Download"] == 1


@live
async def test_failed_training_is_reported_and_the_agent_lives(tmp_path):
    async with lagoon() as coordinator, agent(coordinator, tmp_path, runner := Instant()):
        version = coordinator.add(Version(model()))
        runner.error = RunnerFailed(FailureReason.WORKER_CRASHED, "was ended by SIGSEGV")
        await coordinator.invite(version)
        failed = await coordinator.heard("failed")
        assert (failed.reason, failed.detail) == ("worker_crashed", "was ended by SIGSEGV")
        runner.error = None
        await coordinator.invite(version, round_id=2)
        await coordinator.accepted.wait()


@pytest.mark.parametrize("local", ["{", "[]", "[" * 100_000])
def test_overrides_that_are_no_object_are_a_failure_of_the_round(tmp_path, local):
    @live
    async def scenario():
        async with lagoon() as coordinator, agent(coordinator, tmp_path):
            await coordinator.invite(coordinator.add(Version(model())), local=local)
            failed = await coordinator.heard("failed")
            assert failed.reason == "training_failed"
            assert "local" in failed.detail

    scenario()


@live
async def test_spool_without_room_is_said_before_anything_is_fetched(tmp_path):
    async with lagoon() as coordinator, agent(coordinator, tmp_path, runner := Instant(), spool_max_bytes=2**20):
        await coordinator.invite(coordinator.add(Version(model(w=2**19))))
        failed = await coordinator.heard("failed")
        assert failed.reason == "disk_full"
        assert "spool_max_bytes" in failed.detail
        assert runner.orders == []
        assert coordinator.calls["Download"] == 0


@live
async def test_evaluation_is_answered(tmp_path):
    async with lagoon() as coordinator, agent(coordinator, tmp_path, runner := Instant()):
        version = coordinator.add(Version(model()))
        request = {"run_id": "run-1", "task": "tiny:task", "model_digest": version.digest, "time_left_s": 10.0}
        request["manifest"] = version.manifest.encode()
        await coordinator.push(evaluate=pb.Evaluate(version=3, **request))
        evaluated = await coordinator.heard("evaluated")
        assert (evaluated.version, evaluated.error) == (3, "")
        assert evaluated.statistics["accuracy"].values == [7.0, 10.0]
        runner.error = RunnerFailed(FailureReason.TRAINING_FAILED, "boom")
        await coordinator.push(evaluate=pb.Evaluate(version=4, **request))
        assert "boom" in (await coordinator.heard("evaluated")).error


@live
async def test_foreign_task_is_refused_by_name(tmp_path):
    async with lagoon() as coordinator, agent(coordinator, tmp_path):
        await coordinator.invite(coordinator.add(Version(model())), task="other:task")
        failed = await coordinator.heard("failed")
        assert failed.reason == "task_not_allowed"
        assert "other:task" in failed.detail


@live
async def test_release_stops_the_training_and_drops_what_it_made(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    async with lagoon() as coordinator, agent(coordinator, tmp_path, runner := Instant()):
        version = coordinator.add(Version(model()))
        runner.go.clear()
        await coordinator.invite(version)
        await runner.begun.wait()
        release = pb.Release(run_id="run-1", round_id=1, reason="round_closed", submit=False)
        await coordinator.push(release=release)
        await until(lambda: "stop" in runner.calls)
        await until(lambda: (tmp_path / "work").exists() and not list((tmp_path / "work").iterdir()))
        await coordinator.invite(version, round_id=2)
        await coordinator.accepted.wait()
        assert parse_update(coordinator.opened[-1].manifest).round_id == 2
        assert coordinator.calls["Upload"] == 1
        await coordinator.push(
            release=pb.Release(run_id="run-1", round_id=2, reason="round_closed")
        )  # its update is in
        await coordinator.invite(version, round_id=3)
        await until(lambda: len(coordinator.opened) == 3)
    told = [line for line in caplog.messages if "no longer waits" in line]
    assert told == ["round 1 of run-1 no longer waits for this site (round closed): its work ends"]


@pytest.mark.parametrize(
    "message",
    [
        {"release": pb.Release(run_id="run-1", round_id=1, reason="run_ended")},
        {"run_ended": pb.RunEnded(run_id="run-1", state="stopped", num_open=1)},
    ],
    ids=lambda message: next(iter(message)),
)
@live
async def test_release_ends_the_upload_of_what_nobody_wants_and_says_so(tmp_path, caplog, message):
    caplog.set_level(logging.INFO)
    async with lagoon() as coordinator, agent(coordinator, tmp_path):
        coordinator.upload_status = (grpc.StatusCode.UNAVAILABLE, "not now")
        await coordinator.invite(coordinator.add(Version(model())))
        await until(lambda: coordinator.calls["Upload"] >= 1)
        assert spooled(tmp_path)
        await coordinator.push(**message)
        await until(lambda: spooled(tmp_path) == [])
    assert caplog.text.count("the update of round 1 of run-1 is no longer wanted: it is deleted") == 1


@live
async def test_runner_that_does_not_stop_is_killed_after_its_lease(tmp_path):
    class Deaf(Instant):
        def stop(self):
            self.calls.append("stop")

    async with lagoon() as coordinator, agent(coordinator, tmp_path, runner := Deaf(), lease=0.2):
        version = coordinator.add(Version(model()))
        runner.go.clear()
        await coordinator.invite(version, time_left=1.5)
        await runner.begun.wait()
        assert (await coordinator.heard("failed")).reason == "worker_hung"
        assert "kill" in runner.calls
        runner.go.set()
        await coordinator.invite(version, round_id=2)
        await coordinator.accepted.wait()


@live
async def test_newer_deadline_reaches_the_runner(tmp_path):
    async with lagoon() as coordinator, agent(coordinator, tmp_path, runner := Instant()):
        version = coordinator.add(Version(model()))
        runner.go.clear()
        await coordinator.invite(version, time_left=20.0)
        await runner.begun.wait()
        await coordinator.invite(version, time_left=50.0)
        await until(lambda: runner.calls)
        ((name, budget),) = runner.calls
        assert name == "extend"
        assert 40 < budget <= 50
        runner.go.set()
        await coordinator.accepted.wait()


@live
async def test_message_that_makes_no_sense_is_ignored_with_a_warning(tmp_path, caplog):
    async with lagoon() as coordinator, agent(coordinator, tmp_path):
        version = coordinator.add(Version(model()))
        await coordinator.invite(version, time_left=float("nan"))
        await coordinator.push(release=pb.Release(run_id="run-1", round_id=1, reason="because"))
        await coordinator.push(run_ended=pb.RunEnded(run_id="two\nlines"))
        await coordinator.push(invite=pb.Invite(run_id="run-1", round_id=1, task="tiny:task", model_digest="../../x"))
        await coordinator.push(invite=pb.Invite(run_id="run-1", round_id=2**63, model_digest=version.digest))
        await coordinator.invite(version)
        await coordinator.accepted.wait()
    assert "time_left_s: got nan" in caplog.text
    for what in ("'because'", r"'two\nlines'", "'../../x'", str(2**63)):
        assert what in caplog.text


@live
async def test_silent_server_counts_as_disconnected(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("atoll.client.wire.control_stream.HANDSHAKE_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel connects, nobody ever answers
        async with lagoon() as coordinator:
            coordinator.address = f"127.0.0.1:{silent.getsockname()[1]}"
            async with agent(coordinator, tmp_path) as task:
                await until(lambda: caplog.text)
                assert not task.done()
    assert "no Welcome within 0.1 s" in caplog.text


@live
async def test_agent_sends_heartbeats(tmp_path):
    async with lagoon() as coordinator:
        coordinator.welcome = pb.Welcome(heartbeat_s=0.05, lease_s=1.0)
        async with agent(coordinator, tmp_path):
            for _ in range(3):
                await coordinator.heard("heartbeat")


@live
async def test_second_agent_in_one_directory_is_refused(tmp_path):
    async with lagoon() as coordinator, agent(coordinator, tmp_path):
        await coordinator.connected()
        with pytest.raises(ConfigError, match="in use by another agent"):
            async with agent(coordinator, tmp_path) as second:
                await second


@pytest.mark.parametrize("name", ["state.db", "database.json", "rank.json"])
@live
async def test_directory_of_a_server_is_refused_and_nothing_is_made_in_it(tmp_path, name):
    (tmp_path / name).touch()
    async with lagoon() as coordinator:
        with pytest.raises(ConfigError, match=f"^state: .* is a coordinator's .*, for it holds {name}: name another$"):
            async with agent(coordinator, tmp_path) as lost:
                await lost
    assert [path.name for path in tmp_path.iterdir()] == [name]
