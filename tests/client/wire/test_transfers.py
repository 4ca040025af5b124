"""The downloads and uploads over real sockets: windows, cuts, damage, rate limit."""

import asyncio
import time
from contextlib import asynccontextmanager
from threading import enumerate as all_threads

import grpc
import numpy as np
import pytest

from atoll.client.disk.model_cache import ModelCache, PieceDamaged
from atoll.client.disk.spool import Costs, Spool
from atoll.client.wire import download as download_module
from atoll.client.wire.control_stream import Link
from atoll.client.wire.download import download
from atoll.client.wire.upload import Pace, upload
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.disclosure import Disclosure, MetricsLeave
from atoll.protocol.identity.dialer import InsecureDialer
from atoll.protocol.manifest import UpdateManifest
from atoll.protocol.wire.channel import CHUNK_BYTES, DOWNLOAD_WINDOW_BYTES, INLINE_BYTES_MAX
from atoll.protocol.wire.mesh_use import MeshUse
from atoll.protocol.wire.stream import StreamBroken
from atoll.tensors.safetensors_file import write
from tests.client.fake_coordinator import MIB, Version, lagoon, live, model, until
from tests.client.shuttable_port import door_before

CUT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL)
"""Status codes of a cut; grpc.aio reports INTERNAL when a message of ours crosses the end of the call."""


@pytest.fixture(params=["on the loop", "on a thread"])
def way(request, monkeypatch):
    """Run a test with downloads on the event loop and on a thread, whatever their size."""
    monkeypatch.setattr(download_module, "LARGE_BYTES", 1 if request.param == "on a thread" else 1 << 60)


def threads():
    """Return the threads other than those of the loop and of grpc.aio, which stay."""
    return {each for each in all_threads() if not each.name.startswith("asyncio_") and "_poll_wrapper" not in each.name}


def partial_of(tmp_path, version):
    cache = ModelCache(tmp_path)
    cache.scan()
    partial = cache.begin(version.digest, version.manifest)
    partial.resume()
    return partial


async def complete(address, version, partial):
    """Download over as many connections as it takes, and return their number."""
    num_links = 0
    while not partial.is_complete:
        link = Link(InsecureDialer(), address)
        num_links += 1
        try:
            await download(link.connection, "run-1", version.digest, partial)
        except StreamBroken as error:
            if error.code not in CUT:
                raise
        finally:
            await link.close()
    return num_links


@live
async def test_download_goes_on_where_it_was_cut(tmp_path, way):
    version = Version(model(a=3 * MIB, b=1000, c=MIB))
    cuts = [0, 1, 5 * MIB, 5 * MIB + 7, 12 * MIB + 3000]
    async with lagoon() as coordinator:
        coordinator.add(version)
        coordinator.download_cuts = list(cuts)
        partial = partial_of(tmp_path, version)
        assert await complete(coordinator.address, version, partial) == len(cuts) + 1
        again = coordinator.sent_bytes - len(version.data)
        assert again <= len(cuts) * DOWNLOAD_WINDOW_BYTES  # grpc drops what it holds
        partial.close()
        assert (tmp_path / f"{version.digest}.part").read_bytes().endswith(version.data)


@live
async def test_download_asks_only_for_the_pieces_that_it_lacks_and_resumes_within_them(tmp_path, way):
    arrays = model(a=MIB, b=MIB, c=MIB, d=MIB, e=MIB)
    old, new = Version(arrays), Version(arrays | {"b": arrays["b"] + 1, "d": arrays["d"] + 1})
    cache = ModelCache(tmp_path)
    cache.scan()
    async with lagoon() as coordinator:
        for version in (old, new):
            coordinator.add(version)
            partial = cache.begin(version.digest, version.manifest)
            partial.resume()
            coordinator.download_cuts = [] if version is old else [6 * MIB]
            await complete(coordinator.address, version, partial)
            cache.finish(version.digest, version.manifest, partial)
        assert coordinator.asked == [["a", "b", "c", "d", "e"], ["b", "d"], ["d"]]
        assert 0 < coordinator.opened[-1].position <= 2 * MIB
        assert coordinator.sent_bytes <= 20 * MIB + 8 * MIB + DOWNLOAD_WINDOW_BYTES
    assert cache.find(new.digest, new.manifest).read_bytes().endswith(new.data)


@live
async def test_damaged_piece_raises_and_nothing_else_is_lost(tmp_path, way):
    version = Version(model(a=1000, b=1000, c=1000))
    async with lagoon() as coordinator:
        coordinator.add(version)
        coordinator.damage["b"] = 1
        partial, link = partial_of(tmp_path, version), Link(InsecureDialer(), coordinator.address)
        with pytest.raises(PieceDamaged, match="'b'"):
            await download(link.connection, "run-1", version.digest, partial)
        assert partial.data_bytes == 4000
        await download(link.connection, "run-1", version.digest, partial)
        assert partial.is_complete
        partial.close()
        await link.close()


@live
async def test_version_that_is_gone_is_refused_for_good(tmp_path, way):
    async with lagoon() as coordinator:
        version, link = Version(model()), Link(InsecureDialer(), coordinator.address)
        partial = partial_of(tmp_path, version)
        with pytest.raises(StreamBroken, match="no such version") as caught:
            await download(link.connection, "run-1", version.digest, partial)
        assert caught.value.code is grpc.StatusCode.NOT_FOUND
        partial.close()
        await link.close()


@live
async def test_download_that_is_not_what_was_asked_for_is_refused_for_good(tmp_path, way):
    asked, other = Version(model(w=2 * MIB)), Version(model(w=2 * MIB + 1))
    async with lagoon() as coordinator:
        coordinator.versions[asked.digest] = other
        partial, link = partial_of(tmp_path, asked), Link(InsecureDialer(), coordinator.address)
        with pytest.raises(StreamBroken, match=r"8388612 bytes were announced, 8388608 were requested") as caught:
            await download(link.connection, "run-1", asked.digest, partial)
        assert caught.value.code is grpc.StatusCode.FAILED_PRECONDITION
        assert partial.data_bytes == 0
        partial.close()
        await link.close()


@asynccontextmanager
async def under_way(tmp_path, version):
    """Begin a download that stops at 10 MiB; yield its coordinator, file, link and task."""
    async with lagoon() as coordinator:
        coordinator.add(version)
        coordinator.download_end = 10 * MIB
        partial, link = partial_of(tmp_path, version), Link(InsecureDialer(), coordinator.address)
        try:
            downloading = asyncio.ensure_future(download(link.connection, "run-1", version.digest, partial))
            await until(lambda: partial.data_bytes == 10 * MIB)
            yield coordinator, partial, link, downloading
        finally:
            await link.close()
            partial.close()


@live
async def test_download_that_is_cancelled_ends_at_once_and_goes_on_later(tmp_path, way):
    version, before = Version(model(w=4 * MIB)), threads()
    async with under_way(tmp_path, version) as (coordinator, partial, link, downloading):
        downloading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await downloading
        await until(lambda: threads() <= before)
        coordinator.download_end = 1 << 60
        await download(link.connection, "run-1", version.digest, partial)
        assert partial.is_complete
        assert coordinator.sent_bytes == 16 * MIB


@live
async def test_download_ends_when_its_link_is_closed(tmp_path, way):
    version = Version(model(w=4 * MIB))
    async with under_way(tmp_path, version) as (_, partial, link, downloading):
        await link.close()
        for attempt in (downloading, download(link.connection, "run-1", version.digest, partial)):
            with pytest.raises(StreamBroken) as caught:
                await attempt
            assert caught.value.code is grpc.StatusCode.CANCELLED
        assert partial.data_bytes == 10 * MIB


@pytest.mark.parametrize("slams", [True, False])
@live
async def test_large_download_needs_no_connection_of_its_own(tmp_path, monkeypatch, slams):
    """Download from a port that strangers flood: it refuses new connections, or sends them no byte."""
    monkeypatch.setattr(download_module, "BEGIN_S", 0.3)
    version = Version(model(w=2 * MIB))  # large enough
    async with lagoon() as coordinator, door_before(coordinator.port) as door:
        coordinator.add(version)
        partial, link = partial_of(tmp_path, version), Link(InsecureDialer(), door.address)
        async with link.calls() as stub:
            await stub.GetManifest(pb.ManifestRequest(digest=version.digest))
        door.slams = slams
        door.is_open.clear()
        await download(link.connection, "run-1", version.digest, partial)
        assert door.num_turned_away >= 1
        assert (partial.is_complete, coordinator.calls["Download"], door.num_inside) == (True, 1, 1)
        partial.remove()
        door.is_open.set()
        partial = partial_of(tmp_path, version)
        while door.num_inside == 1:  # until gRPC tries it again
            await download(link.connection, "run-1", version.digest, partial)
            partial.remove()
            partial = partial_of(tmp_path, version)
            await asyncio.sleep(0.05)
        partial.close()
        await link.close()


@pytest.mark.parametrize(("mib", "has_its_own"), [(7, False), (8, True)])
@live
async def test_only_a_large_download_has_a_connection_of_its_own(tmp_path, mib, has_its_own):
    version = Version(model(w=mib * MIB // 4))
    async with lagoon() as coordinator:
        coordinator.add(version)
        partial, link = partial_of(tmp_path, version), Link(InsecureDialer(), coordinator.address)
        async with link.calls() as stub:
            await stub.GetManifest(pb.ManifestRequest(digest=version.digest))
        await download(link.connection, "run-1", version.digest, partial)
        assert partial.is_complete
        assert (coordinator.peers["Download"] != coordinator.peers["GetManifest"]) is has_its_own
        partial.close()
        await link.close()


@live
async def test_large_download_that_does_not_begin_takes_the_other_way(tmp_path, monkeypatch):
    monkeypatch.setattr(download_module, "BEGIN_S", 1.0)
    version = Version(model(w=2 * MIB))
    async with lagoon() as coordinator:
        coordinator.add(version)
        coordinator.answers_first_download = False
        partial, link = partial_of(tmp_path, version), Link(InsecureDialer(), coordinator.address)
        await download(link.connection, "run-1", version.digest, partial)
        assert partial.is_complete
        own, of_session = coordinator.peers["Download"]
        assert own != of_session
        partial.close()
        await link.close()


def spooled(tmp_path, num_floats):
    (tmp_path / "spool").mkdir(exist_ok=True)
    out = tmp_path / "out"
    pieces = write(out, {"w": np.random.default_rng(0).standard_normal(num_floats).astype(np.float32)})
    manifest = UpdateManifest("run-1", 1, "north", 0, "0" * 64, 10, 1.0, pieces)
    costs = Costs(train_seconds=1.5, mesh=MeshUse(num_ranks=2, peak_bytes=7, steps_per_s=3.0))
    return Spool(tmp_path / "spool", 2**30).add(out, manifest, statistics={"loss": (2.0, 4.0)}, costs=costs)


async def delivered(address, entry, pace):
    """Upload over as many connections as it takes, and return the verdict and their number."""
    num_links = 0
    while True:
        link = Link(InsecureDialer(), address)
        num_links += 1
        try:
            async with link.calls() as stub:
                return await upload(stub, entry, pace, is_first_attempt=num_links == 1), num_links
        except StreamBroken as error:
            if error.code not in CUT:
                raise
        finally:
            await link.close()


@live
async def test_upload_goes_on_where_it_was_cut_and_sends_little_twice(tmp_path):
    entry = spooled(tmp_path, 8 * MIB)  # 32 MiB
    cuts = [0, 100, 10 * MIB, 20 * MIB + 1, 32 * MIB - 1]
    async with lagoon() as coordinator:
        coordinator.upload_cuts = list(cuts)
        verdict, num_links = await delivered(coordinator.address, entry, Pace(0))
        assert verdict.accepted
        assert num_links == len(cuts) + 1
        assert coordinator.received_bytes - 32 * MIB <= len(cuts) * CHUNK_BYTES
        opened = coordinator.opened[-1]
        assert opened.statistics["loss"].values == [2.0, 4.0]
        assert opened.train_seconds == 1.5


@live
@pytest.mark.parametrize("leave", MetricsLeave)
async def test_the_use_of_a_mesh_leaves_as_metrics_of_this_site_alone_do(tmp_path, leave):
    entry = spooled(tmp_path, 4)
    async with lagoon() as coordinator:
        link = Link(InsecureDialer(), coordinator.address)
        async with link.calls() as stub:
            await upload(stub, entry, Pace(0), is_first_attempt=True, disclosure=Disclosure(leave))
        await link.close()
        opened = coordinator.opened[-1]
        assert opened.HasField("mesh") is (leave is MetricsLeave.PER_SITE)
        assert opened.mesh.peak_bytes == (7 if opened.HasField("mesh") else 0)


@live
async def test_upload_keeps_within_the_window_that_it_is_told(tmp_path):
    """Let the lagoon check every chunk; before its first message the widest window holds."""
    entry = spooled(tmp_path, 2 * MIB)  # 8 MiB
    async with lagoon() as coordinator:
        coordinator.window = MIB
        verdict, _ = await delivered(coordinator.address, entry, Pace(0))
        assert verdict.accepted
        assert max(coordinator.chunk_sizes) == MIB // 4, "and smaller ones until the line is known"
        assert coordinator.received_bytes == 8 * MIB


@live
async def test_small_update_rides_with_its_manifest(tmp_path):
    entry = spooled(tmp_path, INLINE_BYTES_MAX // 4)
    async with lagoon() as coordinator:
        verdict, _ = await delivered(coordinator.address, entry, Pace(0))
        assert verdict.accepted
        assert len(coordinator.opened[-1].data) == coordinator.received_bytes == INLINE_BYTES_MAX


@live
async def test_coordinator_that_ignores_inline_data_gets_chunks(tmp_path):
    entry = spooled(tmp_path, 8)
    async with lagoon() as coordinator:
        coordinator.knows_no_inline_data = True
        verdict, num_links = await delivered(coordinator.address, entry, Pace(0))
        assert (verdict.accepted, num_links) == (True, 1)


@live
async def test_accepted_update_is_answered_again_without_bytes(tmp_path):
    entry = spooled(tmp_path, 1000)
    async with lagoon() as coordinator:
        for _ in range(3):
            verdict, _ = await delivered(coordinator.address, entry, Pace(0))
            assert verdict.accepted
        assert coordinator.received_bytes == 4000


@live
async def test_verdict_in_the_middle_of_the_bytes_is_heard(tmp_path):
    entry = spooled(tmp_path, 8 * MIB)
    async with lagoon() as coordinator:
        coordinator.early_verdict = pb.Verdict(reason="too_late")
        verdict, num_links = await delivered(coordinator.address, entry, Pace(0))
        assert verdict.reason == "too_late"
        assert num_links == 1
        assert coordinator.received_bytes <= 5 * MIB


@live
async def test_pace_is_kept_and_smooth(tmp_path):
    entry = spooled(tmp_path, MIB // 4)  # 1 MiB
    pace = Pace(2 * MIB)
    assert pace.chunk_bytes < MIB // 8
    async with lagoon() as coordinator:
        began = time.monotonic()
        verdict, _ = await delivered(coordinator.address, entry, pace)
        assert verdict.accepted
        assert time.monotonic() - began >= 0.4


@live
async def test_two_uploads_share_one_pace():
    pace, waits = Pace(1000), []

    async def sleep(seconds):
        waits.append(seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio.get_running_loop(), "time", lambda: 7.0)
        patch.setattr(asyncio, "sleep", sleep)
        for _ in range(3):
            await pace.take(100)
    assert waits == pytest.approx([0.1, 0.2])
    assert Pace(0).chunk_bytes == CHUNK_BYTES
