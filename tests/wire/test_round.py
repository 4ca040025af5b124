"""Rounds over real gRPC: what a client of bare messages sees."""

import asyncio
import functools

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from atoll.ground.printable import count_of
from atoll.protocol import atoll_pb2 as pb
from atoll.server import ports
from atoll.server.files import incoming
from atoll.server.files.incoming import SMALL_BYTES
from atoll.server.process import host
from atoll.server.views.history import History
from atoll.tensors.safetensors_file import read
from tests.waiting import BOUND_S
from tests.wire.live_coordinator import TINY, running, settings


def live(test):
    """Run an async test on a loop of its own."""

    @functools.wraps(test)
    def run(*arguments, **fixtures):
        async def bounded():
            async with asyncio.timeout(BOUND_S):
                await test(*arguments, **fixtures)

        asyncio.run(bounded())

    return run


async def report(client, value=1.0, **claims):
    invite = await client.next("invite")
    manifest, data = await client.train(invite, value=value, **claims)
    return invite, await client.upload(manifest, data)


async def committed(live_, version):
    """Wait until a version is decided and on disk, where the next coordinator finds it."""
    async with asyncio.timeout(BOUND_S):
        while (run := live_.run).machine.ledger.version < version:
            await asyncio.sleep(0.01)
        await run.on_disk()


@live
async def test_round_commits_the_weighted_mean_of_two_clients(tmp_path):
    async with running(tmp_path / "state", rounds=1) as it, it.client("a") as a, it.client("b") as b:
        (_, one), (_, two) = await asyncio.gather(report(a, 1.0, num_examples=30), report(b, 5.0, num_examples=10))
        assert one.accepted
        assert two.accepted
        ended = await a.next("run_ended")
        assert ended.state == "finished"
        model = read(it.run.reducer.version(1).path)
        np.testing.assert_array_equal(model["w"], np.full(4, (30 * 1 + 10 * 5) / 40, np.float32))
        assert model["count"] == 2


@live
async def test_download_sends_any_box_from_any_byte(tmp_path):
    async with running(tmp_path / "state") as it, it.client("a") as a, it.client("b"):
        invite = await a.next("invite")
        manifest, whole, _ = await a.download(invite)
        assert len(whole) == manifest.num_bytes == 24
        assert (await a.download(invite, position=5))[1] == whole[5:]
        boxes = [pb.Box(tensor="w", offsets=[1], lengths=[2]), pb.Box(tensor="count")]
        _, part, digest = await a.download(invite, boxes=boxes)
        assert part == whole[12:20] + whole[:8]
        import hashlib

        assert digest == hashlib.sha256(part).digest()


@live
async def test_small_update_rides_with_its_manifest(tmp_path):
    async with running(tmp_path / "state", rounds=1) as it, it.client("a") as a, it.client("b") as b:
        for client in (a, b):
            manifest, data = await client.train(await client.next("invite"), value=3.0)
            verdict = await client.upload(manifest, b"", data=data)
            assert verdict.accepted, verdict
            assert not hasattr(client, "resumed_at"), "there is nothing to ask for"
        await committed(it, 1)
        assert read(it.run.reducer.version(1).path)["w"].tolist() == [3.0] * 4


@pytest.mark.parametrize("num_bytes", [1, 1 << 15])
@live
async def test_part_of_an_update_does_not_ride_with_its_manifest(tmp_path, num_bytes):
    async with running(tmp_path / "state") as it, it.client("a") as a, it.client("b"):
        manifest, whole = await a.train(await a.next("invite"))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await a.upload(manifest, b"", data=bytes(num_bytes))
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert f"UploadOpen has {count_of(num_bytes, 'byte')} of an update of {len(whole)}" in error.value.details()
        assert (await a.upload(manifest, b"", data=whole)).accepted


@pytest.mark.parametrize(("small_bytes", "kept"), [(0, 10), (SMALL_BYTES, 0)])
@live
async def test_upload_goes_on_where_it_was_cut_and_a_small_one_begins_again(tmp_path, monkeypatch, small_bytes, kept):
    monkeypatch.setattr(incoming, "SMALL_BYTES", small_bytes)
    async with running(tmp_path / "state") as it, it.client("a") as a, it.client("b"):
        manifest, data = await a.train(await a.next("invite"))
        assert await a.upload(manifest, data, cut_at=10, chunk=5) is None
        a.resumed_at = []
        assert (await a.upload(manifest, data, chunk=5)).accepted
        assert a.resumed_at[0] >= kept if kept else a.resumed_at[0] == 0


@live
async def test_repeated_upload_is_accepted_again_without_bytes_and_counts_once(tmp_path):
    async with running(tmp_path / "state") as it, it.client("a") as a, it.client("b"):
        manifest, data = await a.train(await a.next("invite"))
        assert (await a.upload(manifest, data)).accepted
        assert (await a.upload(manifest, b"")).accepted
        assert it.run.machine.round.record.num_reported == 1


@live
async def test_client_is_released_when_enough_others_have_reported(tmp_path):
    async with (
        running(tmp_path / "state", round__over_selection=1.5, round__quorum=2) as it,
        it.client("a") as a,
        it.client("b") as b,
        it.client("c") as c,
    ):
        await asyncio.gather(report(a), report(b))
        release = await c.next("release")
        assert (release.round_id, release.reason, release.submit) == (1, "round_closed", False)


@live
async def test_client_that_reconnects_is_invited_again(tmp_path):
    async with running(tmp_path / "state") as it, it.client("a", session="first") as a, it.client("b"):
        first = await a.next("invite")
        async with it.client("a", session="second") as again:
            second = await again.next("invite")
            assert (second.round_id, second.seed) == (first.round_id, first.seed)
            assert second.time_left_s <= first.time_left_s


@live
async def test_late_update_is_refused_with_the_reason(tmp_path):
    async with running(tmp_path / "state", round__quorum=1, round__linger=0) as it:
        async with it.client("a") as a, it.client("b") as b:
            invite = await a.next("invite")
            manifest, data = await a.train(invite)
            await report(b)
            await committed(it, 1)
            verdict = await a.upload(manifest, data)
            assert (verdict.accepted, verdict.reason) == (False, "too_late")


@live
async def test_coordinator_recovers_in_the_same_round_with_the_update_that_was_kept(tmp_path):
    async with running(tmp_path / "state") as it, it.client("a") as a, it.client("b"):
        _, verdict = await report(a)
        assert verdict.accepted
    async with running(tmp_path / "state") as it:
        record = it.run.machine.round.record
        assert (record.round_id, record.num_reported) == (1, 1)
        assert len(record.outages) == 1
        async with it.client("b") as b:
            await report(b)
            await committed(it, 1)


@live
async def test_metrics_of_the_servers_data_are_recorded(tmp_path):
    async with running(tmp_path / "state", rounds=1, evaluation__server_every=1) as it:
        async with it.client("a") as a, it.client("b") as b:
            await asyncio.gather(report(a, 2.0), report(b, 2.0))
            await a.next("run_ended", timeout=BOUND_S)
            assert it.run.machine.ledger.unevaluated == []


@live
async def test_one_client_more_than_allowed_is_turned_away_and_told_so(tmp_path):
    async with running(tmp_path / "state", coordinator__max_connections=1) as it, it.client("a") as a:
        await a.next("welcome")
        async with it.client("b") as b:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await b.control.read()
            assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        async with it.client("a", session="again") as again:
            await again.next("welcome")


@live
async def test_health_check_says_serving(tmp_path):
    async with running(tmp_path / "state") as it, grpc.aio.insecure_channel(it.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "atoll.v1.Coordinator"):
            reply = await stub.Check(health_pb2.HealthCheckRequest(service=service))
            assert reply.status == health_pb2.HealthCheckResponse.SERVING


@live
async def test_a_probe_without_tls_has_a_port_that_says_serving_and_answers_nothing_else(tmp_path):
    """Check the port that a kubelet asks: its probes have neither TLS nor a certificate."""
    settings = {"coordinator__insecure": False, "coordinator__health": "127.0.0.1:0"}
    async with running(tmp_path / "state", **settings) as it:
        _, address = it.ports.probes
        async with grpc.aio.insecure_channel(address) as channel:
            for service in ("", "atoll.v1.Coordinator", "clocks"):
                reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
                assert reply.status == health_pb2.HealthCheckResponse.SERVING
            for method in ("/atoll.v1.Enrolment/GetAuthority", "/atoll.v1.Admin/ListMembers"):
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await channel.unary_unary(method)(b"")
                assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED
        async with grpc.aio.insecure_channel(it.ports.enrolment.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=BOUND_S)
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE, "which is why the probes have a port"


@live
async def test_a_call_that_lasts_holds_no_place_for_ever_at_a_port_for_strangers(tmp_path, monkeypatch):
    quick = [(name, value // 500 if name.endswith("_ms") else value) for name, value in ports.SHORT_CALLS]
    monkeypatch.setattr(ports, "SHORT_CALLS", quick)
    settings = {"coordinator__insecure": False, "coordinator__health": "127.0.0.1:0"}
    async with running(tmp_path / "state", **settings) as it, grpc.aio.insecure_channel(it.ports.probes[1]) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        with pytest.raises(grpc.aio.AioRpcError):
            [_ async for _ in watch]


@live
async def test_only_the_newest_rounds_stay_in_the_records(tmp_path):
    async with running(tmp_path / "state", rounds=4, coordinator__keep_rounds=2) as it:
        async with it.client("a") as a, it.client("b") as b:
            for _ in range(4):
                await asyncio.gather(report(a), report(b))
            await a.next("run_ended")
            while [r.round_id for r in History(tmp_path / "state").rounds("tiny-1")] != [3, 4]:
                await asyncio.sleep(0.02)


@live
async def test_stopped_run_can_be_resumed_and_goes_on_from_its_last_version(tmp_path):
    async with running(tmp_path / "state", rounds=2) as it, it.admin() as admin:
        async with it.client("a") as a, it.client("b") as b:
            await asyncio.gather(report(a), report(b))
            assert (await a.next("invite")).round_id == 2
            await admin.StopRun(pb.StopRunRequest(run_id="tiny-1", reason="lunch"))
            ended = await a.next("run_ended")
            assert (ended.state, ended.cause) == ("stopped", "lunch")
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await admin.StopRun(pb.StopRunRequest(run_id="tiny-1"))
            assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            await admin.ResumeRun(pb.ResumeRunRequest(run_id="tiny-1"))
            while (await a.next("invite")).round_id < 3:
                pass
            assert it.run.machine.ledger.version == 1
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await admin.ResumeRun(pb.ResumeRunRequest(run_id="other-1"))
            assert error.value.code() is grpc.StatusCode.NOT_FOUND


@live
async def test_run_that_is_started_by_the_operator_waits_for_room(tmp_path):
    one = {"rounds": 1, "coordinator__max_runs": 1}
    async with running(tmp_path / "state", **one) as it, it.admin() as admin:
        toml = f'name = "tiny"\ntask = "{TINY}"\nrounds = 1\n[round]\ncohort_size = 2'
        reply = await admin.StartRun(pb.StartRunRequest(config_toml=toml, overrides=["seed=3"]))
        assert (reply.run_id, reply.state) == ("tiny-2", "queued")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await admin.StartRun(pb.StartRunRequest(config_toml=toml, overrides=["round.quorum=9", "sed=3"]))
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "quorum" in error.value.details()
        assert "sed: unknown key" in error.value.details()
        async with it.client("a") as a, it.client("b") as b:
            await asyncio.gather(report(a), report(b))
            assert (await a.next("invite")).run_id == "tiny-2"


@live
async def test_run_that_has_ended_begins_anew_only_when_asked_to(tmp_path, caplog):
    """A supervisor starts the same command again and again."""
    async with running(tmp_path / "state", rounds=1) as it, it.client("a") as a, it.client("b") as b:
        await asyncio.gather(report(a), report(b))
        await a.next("run_ended")
    config = settings(tmp_path / "state", rounds=1)
    assert await host(config.coordinator, config.run) == 0
    assert "run tiny-1 with these settings is finished already (1 round is committed): --stay and" in caplog.text
    assert "`atoll run resume tiny-1 --rounds 2` continue it, --again starts a new one" in caplog.text
    assert [run.run_id for run in History(tmp_path / "state").runs()] == ["tiny-1"]
    async with running(tmp_path / "state", rounds=2) as it:
        assert list(it.coordinator.runs) == ["tiny-1", "tiny-2"]
        assert "run tiny-1 is finished at version 1, and `atoll run resume tiny-1 --set rounds=2`" in (
            it.coordinator.namesake_of("tiny-2")
        )
        await it.coordinator.stop_run("tiny-2", "enough")
    config = settings(tmp_path / "state", rounds=2)
    assert await host(config.coordinator, config.run) == 1, "as when it was stopped"
    assert "is stopped already (enough): --stay and `atoll run resume tiny-2` continue it" in caplog.text
    again = asyncio.ensure_future(host(config.coordinator, config.run, again=True))
    while len(History(tmp_path / "state").runs()) < 3:
        await asyncio.sleep(0.01)
    again.cancel()
    await asyncio.wait([again])


@live
async def test_health_is_watched_by_whoever_wants_to(tmp_path):
    async with running(tmp_path / "state") as it, grpc.aio.insecure_channel(it.address) as channel:
        watching = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watching.read()).status == health_pb2.HealthCheckResponse.SERVING
        watching.cancel()
