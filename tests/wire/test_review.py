"""The faults that a hostile review found: each test failed once, over real gRPC."""

import asyncio
import contextlib
import threading
import time

import grpc
import pytest

from atoll.ground.durable import DiskFull
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.vocabulary import RunId, RunState, Version
from atoll.server.files import incoming
from atoll.server.files.incoming import SMALL_BYTES
from atoll.server.hosting import run_driver as driver_module
from atoll.server.process import host
from atoll.server.required.keep import Keep
from atoll.server.rounds.events import UpdateReceived
from atoll.server.views.history import History
from atoll.server.views.views import unmeasured
from tests.waiting import BOUND_S
from tests.wire.live_coordinator import TINY, Live, running, settings
from tests.wire.test_round import committed, live, report

NEXT = f'name = "next"\ntask = "{TINY}"\nrounds = 1\n[round]\ncohort_size = 2'


async def until(condition, timeout=BOUND_S):
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.01)


def slow_journal(it, seconds):
    """Let every commit take `seconds`."""
    commit = it.coordinator.journal.commit

    def slow(batch):
        time.sleep(seconds)
        commit(batch)

    it.coordinator.journal.commit = slow


@live
async def test_client_that_goes_away_while_its_update_is_journaled_disturbs_nobody(tmp_path):
    async with running(tmp_path / "state") as it, it.client("a") as a, it.client("b") as b:
        manifest, data = await a.train(await a.next("invite"))
        slow_journal(it, 0.5)
        upload = asyncio.ensure_future(a.upload(manifest, data))
        await until(lambda: it.run.machine.round.record.num_reported == 1)
        upload.cancel()
        await asyncio.sleep(0.8)
        assert not it.coordinator.crashed.done()
        assert (await a.upload(manifest, data)).accepted
        assert (await report(b))[1].accepted
        await committed(it, 1)


@live
async def test_operator_who_goes_away_while_a_stop_is_journaled_disturbs_nobody(tmp_path):
    async with running(tmp_path / "state") as it, it.admin() as admin:
        async with it.client("a") as a:
            await a.next("welcome")
            await asyncio.sleep(0.2)
            slow_journal(it, 0.5)
            call = admin.StopRun(pb.StopRunRequest(run_id="tiny-1", reason="lunch"))
            await until(lambda: it.run.machine.ledger.state is RunState.STOPPED)
            call.cancel()
            assert (await a.next("run_ended")).cause == "lunch"
            assert not it.coordinator.crashed.done()


async def answer(client, **sums):
    """Answer the next evaluation that a client is asked for."""
    asked = await client.next("evaluate")
    evaluated = pb.Evaluated(run_id=asked.run_id, version=asked.version)
    for name, values in sums.items():
        evaluated.statistics[name].values.extend(values)
    await client.control.write(pb.ClientMessage(evaluated=evaluated))


@live
async def test_statistics_of_different_lengths_cost_no_run(tmp_path):
    state = tmp_path / "state"
    async with running(state, rounds=1, evaluation__clients_every=1) as it:
        async with it.client("a") as a, it.client("b") as b:
            await asyncio.gather(report(a), report(b))
            for client, values in ((a, [1.0, 2.0]), (b, [1.0])):
                await answer(client, accuracy=values)
            assert (await a.next("run_ended")).state == "finished"
        assert not it.coordinator.crashed.done()
    async with running(state, rounds=1, evaluation__clients_every=1) as it:
        assert it.coordinator.runs["tiny-1"].machine.ledger.state is RunState.FINISHED


@live
async def test_sums_that_are_nan_are_refused_by_name_and_the_others_count(tmp_path):
    state = tmp_path / "state"
    async with running(state, rounds=1, evaluation__clients_every=1) as it:
        async with it.client("a") as a, it.client("b") as b:
            await asyncio.gather(report(a), report(b))
            for client, total in ((a, float("nan")), (b, 1.0)):
                await answer(client, accuracy=[total, 4.0], loss=[3.0, 4.0])
            assert (await a.next("run_ended")).state == "finished"
        (row,) = [row for row in History(state).evaluations(RunId("tiny-1")) if row.source == "clients"]
        assert row.statistics == {"accuracy": (1.0, 4.0), "loss": (6.0, 8.0)}
        assert (row.num_clients, row.detail) == (
            2,
            "a: metric 'accuracy': its sums are NaN, infinite or left out",
        )
        assert unmeasured([row]) == [{"version": 1, "source": "clients", "reason": row.detail}]


@live
async def test_old_version_can_be_served_however_many_newer_ones_were(tmp_path):
    async with running(tmp_path / "state", rounds=12) as it, it.client("a") as a, it.client("b") as b:
        first = await a.next("invite")
        for version in range(1, 11):
            invite = first if version == 1 else await a.next("invite")
            (_, one), (_, two) = await asyncio.gather(_report_to(a, invite), report(b))
            assert one.accepted
            assert two.accepted
            await committed(it, version)
        assert it.run.reducer.version(Version(0)).digest == first.model_digest
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await a.stub.GetManifest(pb.ManifestRequest(run_id=first.run_id, digest="0" * 64))
        assert error.value.code() is grpc.StatusCode.NOT_FOUND


async def _report_to(client, invite):
    manifest, data = await client.train(invite)
    return invite, await client.upload(manifest, data)


@live
async def test_queued_run_starts_when_a_run_that_an_earlier_process_began_ends(tmp_path):
    toml = f'name = "next"\ntask = "{TINY}"\nrounds = 1\n[round]\ncohort_size = 2\n[evaluation]\nserver_every = 0'
    one = {"rounds": 1, "coordinator__max_runs": 1}
    async with running(tmp_path / "state", **one) as it, it.admin() as admin:
        await admin.StartRun(pb.StartRunRequest(config_toml=toml))
    async with running(tmp_path / "state", **one) as it, it.client("a") as a, it.client("b") as b:
        await asyncio.gather(report(a), report(b))
        while (await a.next("invite")).run_id != "next-1":
            pass


@live
@pytest.mark.parametrize("small_bytes", [0, SMALL_BYTES])
async def test_update_that_is_accepted_while_garbage_is_collected_stays(tmp_path, monkeypatch, small_bytes):
    monkeypatch.setattr(incoming, "SMALL_BYTES", small_bytes)
    async with running(tmp_path / "state") as it, it.client("a") as a, it.client("b") as b:
        manifest, data = await a.train(await a.next("invite"))
        await _cut_before_the_decision(it, a, manifest, data)
        store = it.run.reducer.store
        versions, collect = store.versions, store.collect_garbage

        def slow(*args, **kwargs):
            time.sleep(0.5)  # as when a large version is deleted, or both threads are busy
            return collect(*args, **kwargs)

        store.collect_garbage = slow
        keep = Keep.after(it.run._seq, it.run.machine, it.run.config.round)
        collecting = asyncio.ensure_future(it.run.retention.collect(keep))
        await asyncio.sleep(0.2)
        assert (await a.upload(manifest, data)).accepted
        await collecting
        it.coordinator.journal.updates(it.run.run_id, [manifest.digest])
        assert store.has_file(manifest.digest) is (not small_bytes)
        assert (await report(b))[1].accepted
        await committed(it, 1)
        assert versions() == store.versions()


@live
async def test_upload_that_was_cut_before_the_decision_sends_no_byte_again(tmp_path, monkeypatch):
    monkeypatch.setattr(incoming, "SMALL_BYTES", 0)
    async with running(tmp_path / "state") as it, it.client("a") as a, it.client("b"):
        manifest, data = await a.train(await a.next("invite"))
        await _cut_before_the_decision(it, a, manifest, data)
        assert (await a.upload(manifest, b"")).accepted


async def _cut_before_the_decision(it, client, manifest, data):
    """Cut an upload between `RunStore.keep` and the machine's decision: it may leave a file behind."""
    post, posted = it.run.post, []

    def lose(event, kept=None):
        posted.append(event)
        return it.run._loop.create_future()

    it.run.post = lose
    upload = asyncio.ensure_future(client.upload(manifest, data))
    await until(lambda: any(isinstance(event, UpdateReceived) for event in posted))
    upload.cancel()
    it.run.post = post


@live
async def test_client_that_was_silent_for_its_lease_is_sent_away_so_that_it_comes_back(tmp_path):
    async with running(tmp_path / "state", coordinator__lease=1.0, round__cohort_size=1) as it, it.client("a") as a:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await a.next("goodbye")
        assert error.value.code() is grpc.StatusCode.ABORTED
        assert "silent" in error.value.details()
        async with it.client("a", session="again") as again:
            await again.next("invite")


@live
async def test_boxes_together_larger_than_the_version_are_refused_before_anything_is_read(tmp_path):
    async with running(tmp_path / "state") as it, it.client("a") as a, it.client("b"):
        boxes = [pb.Box(tensor="w", offsets=[0], lengths=[4])] * 2
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await a.download(await a.next("invite"), boxes=boxes, position=30)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "32 bytes" in error.value.details()


@live
async def test_run_that_is_stopped_while_it_waits_is_stopped_for_good(tmp_path):
    toml, one = f'name = "next"\ntask = "{TINY}"\nrounds = 1', {"coordinator__max_runs": 1}
    async with running(tmp_path / "state", **one) as it, it.admin() as admin:
        await admin.StartRun(pb.StartRunRequest(config_toml=toml))
        reply = await admin.StopRun(pb.StopRunRequest(run_id="next-1", reason="a mistake"))
        assert reply.state == "stopped"
        assert [run.run_id for run in it.coordinator.running] == ["tiny-1"]
    async with running(tmp_path / "state") as it:
        assert it.coordinator.state_of("next-1") is RunState.STOPPED
        assert it.coordinator.queue == []


@live
async def test_what_a_client_says_again_and_again_is_journaled_once(tmp_path):
    async with running(tmp_path / "state", round__cohort_size=3, round__quorum=1) as it:
        async with it.client("a") as a, it.client("b") as b, it.client("c") as c:
            first, invite = await a.next("invite"), await b.next("invite")
            await asyncio.sleep(0.1)
            seq = it.run._seq
            failed = pb.Failed(run_id=invite.run_id, round_id=invite.round_id, reason="training_failed")
            failed.detail = "no \x1b[2Jdisk\n12:00:00 forged"
            strange = pb.Failed(run_id=invite.run_id, round_id=2**63, reason="training_failed")
            evaluated = pb.Evaluated(run_id=invite.run_id, version=0)
            for _ in range(20):
                for message in ({"failed": failed}, {"failed": strange}, {"evaluated": evaluated}):
                    await b.control.write(pb.ClientMessage(**message))
            manifest, data = await a.train(first)
            for _ in range(20):
                await a.upload(manifest, data, cut_at=0)
            await until(lambda: it.run.machine.round.record.clients["b"].reason)
            await asyncio.sleep(0.3)
            assert it.run._seq <= seq + 2  # b failed, a's upload was begun
            record = it.run.machine.round.record.clients["b"]
            assert (record.reason, record.detail) == ("training_failed", "no \\u001b[2Jdisk\\u000a12:00:00 forged")
            del c


@live
async def test_statistics_beyond_measure_are_an_answer_without_statistics(tmp_path):
    async with running(tmp_path / "state", rounds=1, evaluation__clients_every=1) as it:
        async with it.client("a") as a, it.client("b") as b:
            await asyncio.gather(report(a), report(b))
            for client, name, count in ((a, "accuracy", 100_000), (b, "x" * 5000, 1)):
                asked = await client.next("evaluate")
                evaluated = pb.Evaluated(run_id=asked.run_id, version=asked.version)
                evaluated.statistics[name].values.extend([0.5] * count)
                await client.control.write(pb.ClientMessage(evaluated=evaluated))
            assert (await a.next("run_ended")).state == "finished"


@pytest.mark.parametrize(
    "hello",
    [{"software": "x" * 1_000_000}, {"tasks": ["four_numbers_task:task", "x" * 5000]}],
    ids=["large", "long task"],
)
def test_hello_that_would_fill_the_memory_is_refused(tmp_path, hello):
    @live
    async def check(tmp_path):
        async with running(tmp_path / "state") as it, it.client("a", **hello) as a:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await a.control.read()
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    check(tmp_path)


@live
async def test_journal_that_cannot_be_pruned_on_a_full_disk_is_pruned_later(tmp_path):
    async with running(tmp_path / "state") as it, it.client("a") as a, it.client("b") as b:

        def full(*args, **kwargs):
            raise DiskFull("no room")

        it.coordinator.journal.prune = full
        await asyncio.gather(report(a), report(b))
        await committed(it, 1)
        await asyncio.sleep(0.3)
        assert not it.coordinator.crashed.done()


@live
async def test_two_runs_that_are_started_at_once_do_not_share_a_folder(tmp_path):
    toml = f'name = "twin"\ntask = "{TINY}"\nrounds = 1'
    async with running(tmp_path / "state") as it, it.admin() as admin:
        start = admin.StartRun
        requests = [pb.StartRunRequest(config_toml=toml, overrides=[f"seed={seed}"]) for seed in (1, 2)]
        replies = await asyncio.gather(*map(start, requests))
        assert sorted(reply.run_id for reply in replies) == ["twin-1", "twin-2"]


@live
async def test_stream_on_which_nothing_comes_is_ended(tmp_path):
    async with running(tmp_path / "state") as it, it.client("a") as a, it.client("b"):
        manifest, _ = await a.train(await a.next("invite"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("atoll.server.transfers.timeouts.SILENCE_S", 0.2)
            for method, opened in (
                (a.stub.Session, None),
                (a.stub.Upload, None),
                (a.stub.Upload, pb.UploadRequest(open=pb.UploadOpen(manifest=manifest.encode()))),
                (a.stub.Download, None),
            ):
                call = method()
                if opened is not None:
                    await call.write(opened)
                    await call.read()
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await call.read()
                assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert not it.coordinator.uploads.is_in_flight(it.run.run_id, manifest.digest)


@live
async def test_run_that_is_over_needs_its_sampler_no_more(tmp_path):
    sampler = tmp_path / "sampler.py"
    sampler.write_text("def first(candidates, count, rng):\n    return [c.client_id for c in candidates[:count]]\n")
    state, reference = tmp_path / "state", f"{sampler}:first"
    async with running(state, rounds=1, cohort__sampler=reference) as it, it.client("a") as a, it.client("b") as b:
        await asyncio.gather(report(a), report(b))
        await a.next("run_ended")
    sampler.unlink()
    async with running(state, name="next") as it:
        assert [run.run_id for run in it.coordinator.running] == ["next-1"]


@live
async def test_exit_code_is_of_the_runs_of_this_process(tmp_path):
    state = tmp_path / "state"
    async with running(state) as it, it.admin() as admin:
        await admin.StopRun(pb.StopRunRequest(run_id="tiny-1"))
    config, ready = settings(state, name="next", rounds=1), asyncio.get_running_loop().create_future()
    process = asyncio.ensure_future(
        host(config.coordinator, config.run, on_ready=lambda c, a: ready.set_result(Live(c, a)))
    )
    it = await ready
    async with it.client("a") as a, it.client("b") as b:
        await asyncio.gather(report(a), report(b))
        await a.next("run_ended")
    assert await process == 0


@contextlib.asynccontextmanager
async def hosting(state, **overrides):
    """A coordinator that ends with its runs, its process, and an admin's stub."""
    config, ready = settings(state, **overrides), asyncio.get_running_loop().create_future()
    process = asyncio.ensure_future(
        host(config.coordinator, config.run, on_ready=lambda c, a: ready.set_result(Live(c, a)))
    )
    try:
        it = await ready
        async with it.admin() as admin:
            yield it, process, admin
    finally:
        process.cancel()
        await asyncio.wait([process])


@pytest.mark.parametrize("is_resumed", [False, True])
@live
async def test_a_run_that_begins_during_the_farewell_is_hosted_to_its_end(tmp_path, monkeypatch, is_resumed):
    monkeypatch.setattr("atoll.server.process.FAREWELL_S", BOUND_S)  # it ends when `a` has left
    async with hosting(tmp_path / "state") as (it, process, admin):
        async with it.client("a") as a:
            await a.next("welcome")
            await admin.StopRun(pb.StopRunRequest(run_id="tiny-1"))
            await it.run.ended.wait()
            if is_resumed:
                begun = await admin.ResumeRun(pb.ResumeRunRequest(run_id="tiny-1"))
            else:
                begun = await admin.StartRun(pb.StartRunRequest(config_toml=NEXT))
            assert begun.state == "running"
        await until(lambda: not it.coordinator.attendance.hub)
        assert not (await asyncio.wait([process], timeout=0.5))[0]
        await admin.StopRun(pb.StopRunRequest(run_id=begun.run_id))
        assert await process == 1


@live
async def test_a_run_that_is_being_made_when_the_last_one_ends_is_hosted(tmp_path):
    async with hosting(tmp_path / "state") as (it, process, admin):
        starting = asyncio.ensure_future(admin.StartRun(pb.StartRunRequest(config_toml=NEXT)))
        while not it.coordinator.is_adding:
            await asyncio.sleep(0)
        await admin.StopRun(pb.StopRunRequest(run_id="tiny-1"))
        assert (await starting).state == "running"
        await admin.StopRun(pb.StopRunRequest(run_id="next-1"))
        assert await process == 1


@live
async def test_end_of_a_run_is_told_to_those_who_work_for_its_task(tmp_path):
    async with running(tmp_path / "state", rounds=1) as it:
        async with it.client("a") as a, it.client("b") as b, it.client("c", tasks=["other:task"]) as c:
            await asyncio.gather(report(a), report(b))
            await a.next("run_ended")
            with pytest.raises(TimeoutError):
                await c.next("run_ended", timeout=0.3)


@live
async def test_parts_of_updates_that_come_too_late_for_any_round_are_deleted(tmp_path):
    async with running(tmp_path / "state", round__quorum=1, round__linger=0) as it:
        async with it.client("a") as a, it.client("b") as b:
            manifest, data = await a.train(await a.next("invite"))
            await a.upload(manifest, data, cut_at=5, chunk=5)
            await asyncio.sleep(0.05)
            for version in (1, 2):
                assert (await report(b))[1].accepted
                await committed(it, version)
            await until(lambda: it.run.reducer.store.disk_usage()["incoming"] == 0)


@live
async def test_sampler_that_hangs_keeps_nobody_from_anything(tmp_path):
    sampler = tmp_path / "sampler.py"
    sampler.write_text("import time\ndef hang(candidates, count, rng):\n    time.sleep(60)\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver_module, "SAMPLER_TIMEOUT_S", 0.2)
        async with running(tmp_path / "state", cohort__sampler=f"{sampler}:hang", round__retry=0) as it:
            async with it.client("a") as a, it.client("b"):
                ended = await a.next("run_ended")
                assert ended.state == "failed"
                assert "sampler" in ended.cause
    began = time.monotonic()
    await asyncio.get_running_loop().shutdown_default_executor()
    assert time.monotonic() - began < 30


@live
async def test_client_that_reads_nothing_does_not_keep_its_place(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("atoll.server.hosting.control_streams.DISMISS_S", 0.1)
        async with running(tmp_path / "state", coordinator__lease=1.0) as it, it.client("a") as a:
            await a.next("welcome")
            connection = next(iter(it.coordinator.attendance.hub))
            for _ in range(100):
                connection.send(pb.ServerMessage(run_ended=pb.RunEnded(cause="x" * 100_000)))
            await until(lambda: len(it.coordinator.attendance.hub) == 0)


@live
async def test_coordinator_that_stops_in_a_fold_leaves_no_fold_behind(tmp_path):
    from atoll.server.folding import reducer

    begun, ended = threading.Event(), threading.Event()

    def endless(*args, execution, **kwargs):
        begun.set()
        try:
            for _ in range(2000):
                execution.between()
                time.sleep(0.01)
        finally:
            ended.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reducer, "fold", endless)
        async with running(tmp_path / "state") as it, it.client("a") as a, it.client("b") as b:
            await asyncio.gather(report(a), report(b))
            await until(begun.is_set)
        assert ended.is_set(), "the next coordinator would fold into the same file"
    async with running(tmp_path / "state") as it:
        await committed(it, 1)
