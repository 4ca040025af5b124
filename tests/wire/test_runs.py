"""Several runs on one coordinator: at the same time, queued, paused, deleted."""

import asyncio

import grpc
import pytest

from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.vocabulary import RunState
from atoll.server.process import host
from atoll.server.views.history import History
from atoll.server.views.views import View, look
from tests.wire.live_coordinator import TINY, running, settings
from tests.wire.test_round import live


def toml(name, **keys):
    """A run of the tiny task, two clients each round."""
    lines = [f'name = "{name}"', f'task = "{TINY}"', *(f"{key} = {value}" for key, value in keys.items())]
    return "\n".join([*lines, "[round]", "cohort_size = 2", "[evaluation]", "server_every = 0"])


async def report(client, invite):
    manifest, data = await client.train(invite)
    assert (await client.upload(manifest, data)).accepted


async def invited_by(client, *run_ids):
    """The next invitation of each of these runs, in whichever order they come."""
    found = {}
    while set(found) != set(run_ids):
        invite = await client.next("invite")
        found.setdefault(invite.run_id, invite)
    return [found[run_id] for run_id in run_ids]


@live
async def test_two_runs_go_on_side_by_side_and_each_ends_alone(tmp_path):
    async with running(tmp_path / "state", rounds=2) as it, it.admin() as admin:
        async with it.client("a") as a, it.client("b") as b:
            reply = await admin.StartRun(pb.StartRunRequest(config_toml=toml("other", rounds=1)))
            assert (reply.run_id, reply.state) == ("other-1", "running")
            invites = [await invited_by(client, "tiny-1", "other-1") for client in (a, b)]
            for client, (_, of_other) in zip((a, b), invites, strict=True):
                await report(client, of_other)
            ended = await a.next("run_ended")
            assert (ended.run_id, ended.state, ended.num_open) == ("other-1", "finished", 1)
            assert it.run.machine.ledger.version == 0, "the other run's commit is none of ours"
            for client, (of_tiny, _) in zip((a, b), invites, strict=True):
                await report(client, of_tiny)
            for client in (a, b):
                [of_tiny] = await invited_by(client, "tiny-1")
                await report(client, of_tiny)
            ended = await a.next("run_ended")
            assert (ended.run_id, ended.state, ended.num_open) == ("tiny-1", "finished", 0)


@live
async def test_a_paused_run_lets_its_round_end_and_begins_no_other_until_it_is_resumed(tmp_path):
    state = tmp_path / "state"
    async with running(state) as it, it.admin() as admin:
        async with it.client("a") as a, it.client("b") as b:
            invites = [await client.next("invite") for client in (a, b)]
            reply = await admin.PauseRun(pb.PauseRunRequest(run_id="tiny-1", reason="lunch"))
            assert (reply.state, reply.message) == ("running", "it pauses when round 1 is over")
            await asyncio.gather(*map(report, (a, b), invites))
            while History(state).run("tiny-1").state is not RunState.PAUSED:  # on disk
                await asyncio.sleep(0.01)
            assert it.run.machine.ledger.version == 1
            with pytest.raises(grpc.aio.AioRpcError, match="only a running one can be paused"):
                await admin.PauseRun(pb.PauseRunRequest(run_id="tiny-1"))
    row = History(state).run("tiny-1")
    assert (row.state, row.cause, row.ended_at) == (RunState.PAUSED, "lunch", None)
    async with running(state) as it, it.admin() as admin:  # as after any crash
        async with it.client("a") as a, it.client("b") as b:
            assert it.coordinator.state_of("tiny-1") is RunState.PAUSED
            reply = await admin.ResumeRun(pb.ResumeRunRequest(run_id="tiny-1"))
            assert reply.state == "running"
            for client in (a, b):
                assert (await client.next("invite")).round_id == 2


@live
async def test_a_finished_run_gets_more_rounds_and_other_settings_also_after_a_restart(tmp_path, caplog):
    state = tmp_path / "state"
    async with running(state, rounds=1) as it, it.admin() as admin, it.client("a") as a, it.client("b") as b:
        for client in (a, b):
            await report(client, await client.next("invite"))
        await a.next("run_ended")
        for overrides, fault in (
            ([], "run tiny-1 is finished: 1 round is committed; `atoll run resume tiny-1 --rounds 2`"),
            (["rounds=1"], "rounds: is 1, and 1 version is committed already; allowed: integer > 1"),
            (["rounds=2", "seed=9"], "seed: fixed for the life of a run; allowed: rounds, pause, round, wait, cohort"),
            (["rounds=2", "round.mode=fedasync"], "round.mode"),
            (["rounds=2", "round.quorum=9"], "quorum 9 is more than cohort_size"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await admin.ResumeRun(pb.ResumeRunRequest(run_id="tiny-1", overrides=overrides))
            assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert fault in error.value.details()
        assert it.coordinator.state_of("tiny-1") is RunState.FINISHED, "nothing was changed"
        changes = ["rounds=3", "round.deadline=77.0"]
        assert (await admin.ResumeRun(pb.ResumeRunRequest(run_id="tiny-1", overrides=changes))).state == "running"
        for client in (a, b):
            invite = await client.next("invite")
            assert (invite.round_id, invite.base_version) == (2, 1)
            assert 70 < invite.time_left_s <= 77
            await report(client, invite)
        await a.next("invite")
        assert it.run.machine.ledger.version == 2
    row = History(state).run("tiny-1")
    assert (row.config.rounds, row.config.round.deadline, row.rules.rounds) == (3, 77.0, 1)
    first, changed = History(state).settings(row.run_id)
    assert (first.config.rounds, first.round_id) == (1, 1)
    assert (changed.config, changed.round_id) == (row.config, 2)
    [change] = look(History(state), View.RUN, "tiny-1")["document"]["changes"]
    assert change["round"] == 2
    assert change["values"]["rounds"] == {"before": 1, "after": 3}
    assert set(change["values"]) == {"rounds", "round.deadline"}
    async with running(state, rounds=1) as it, it.client("a") as a, it.client("b") as b:  # as a supervisor starts it
        assert list(it.coordinator.runs) == ["tiny-1"], "the settings that it began with are its own"
        assert it.run.machine.rules.rounds == 3
        for client in (a, b):
            await report(client, await client.next("invite"))
        assert (await a.next("run_ended")).cause == "3 rounds are committed"
    config = settings(state, rounds=1)
    assert await host(config.coordinator, config.run) == 0
    assert "run tiny-1 with these settings is finished already (3 rounds are committed)" in caplog.text
    async with running(state, rounds=2, name="other") as it, it.admin() as admin:
        await admin.DeleteRun(pb.DeleteRunRequest(run_id="tiny-1"))
        assert History(state).settings(row.run_id) == []


@live
async def test_beyond_max_runs_they_wait_and_a_pause_makes_room(tmp_path):
    async with running(tmp_path / "state", coordinator__max_runs=1) as it:
        async with it.admin() as admin, it.client("a"):
            assert (await admin.StartRun(pb.StartRunRequest(config_toml=toml("other")))).state == "queued"
            assert (await admin.PauseRun(pb.PauseRunRequest(run_id="tiny-1"))).state == "paused"
            while it.coordinator.state_of("other-1") is not RunState.RUNNING:
                await asyncio.sleep(0.01)
            reply = await admin.ResumeRun(pb.ResumeRunRequest(run_id="tiny-1"))
            assert reply.state == "queued"
            assert "max_runs" in reply.message
    async with running(tmp_path / "state", coordinator__max_runs=1) as it:
        async with it.admin() as admin:
            assert it.coordinator.state_of("tiny-1") is RunState.QUEUED, "its place in the queue is in the journal"
            await admin.StopRun(pb.StopRunRequest(run_id="other-1"))
            while it.coordinator.state_of("tiny-1") is not RunState.RUNNING:
                await asyncio.sleep(0.01)


@live
async def test_a_deleted_run_leaves_nothing_and_its_id_is_never_given_again(tmp_path):
    state = tmp_path / "state"
    async with running(state) as it, it.admin() as admin:
        with pytest.raises(grpc.aio.AioRpcError, match="only one that has ended can be deleted"):
            await admin.DeleteRun(pb.DeleteRunRequest(run_id="tiny-1"))
        await admin.StopRun(pb.StopRunRequest(run_id="tiny-1"))
        assert (await admin.DeleteRun(pb.DeleteRunRequest(run_id="tiny-1"))).state == "deleted"
        assert History(state).runs() == []
        assert [*(state / "runs").iterdir()] == []
        with pytest.raises(grpc.aio.AioRpcError, match="there is no run 'tiny-1'"):
            await admin.DeleteRun(pb.DeleteRunRequest(run_id="tiny-1"))
        (state / "runs" / "tiny-1").mkdir()  # as if the process had been killed before the files were gone
    config = settings(state)
    assert config.run.name == "tiny"
    async with running(state) as it:
        assert list(it.coordinator.runs) == ["tiny-2"]
        assert [path.name for path in (state / "runs").iterdir()] == ["tiny-2"]
