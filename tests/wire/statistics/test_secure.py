"""Statistics in a secure sum at a real coordinator with certificates, with the agents' shells behind bare streams."""

import asyncio
import time
from contextlib import AsyncExitStack, closing

import grpc

from atoll.client.policy.gate import Gate
from atoll.client.site.security import SiteSecurity
from atoll.client.wire.messages import event_of
from atoll.client.work.secure_sums import SecureSums
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.identity.keeper import Keeper
from atoll.protocol.identity.statement import check_publisher, check_signature
from tests.client.work.test_sums_of_statistics import statistics_of
from tests.wire.live_coordinator import running
from tests.wire.statistics.test_requests import asking, result
from tests.wire.test_round import live

POLICY = 'tasks = ["*"]\nruns = ["*"]\nstatistics = "merged"\nstatistics_min_count = 1\n[secure]\nrequired = true\n'
PLAN = (
    *("round.cohort_size=4", "secure.clip_norm=1.0", "secure.examples_max=9", "secure.stage_timeout=20"),
    *("secure.statistics.labels.target=2", "secure.statistics.features.age=[0,100]"),
)


class Stores:
    """The stores of a site that encodes no update."""

    encoded = spool = type("Empty", (), {"entries": dict, "discard": print})()
    models = work = None
    noise_secret = b""


def shell_of(it, client, stack):
    """Return the part of an agent that joins sessions, which answers on a client's stream."""
    folder = it.coordinator.config.state.parent / f"client-{client.name}"
    policy = folder.with_suffix(".toml")
    policy.write_text(POLICY)
    gate, keeper = stack.enter_context(closing(Gate(policy, folder))), Keeper(folder / "identity")
    loop, queue = asyncio.get_running_loop(), asyncio.Queue()

    async def sending():
        while True:
            await client.control.write(await queue.get())

    async def beating():
        """Keep the lease while others enrol."""
        while True:
            queue.put_nowait(pb.ClientMessage(heartbeat=pb.Heartbeat()))
            await asyncio.sleep(0.2)

    tasks = [loop.create_task(sending()), loop.create_task(beating())]
    stack.callback(lambda: [task.cancel() for task in tasks])

    def spawn(work):
        tasks.append(loop.create_task(work))
        return tasks[-1]

    security = SiteSecurity(client.name, folder, gate, keeper)
    return SecureSums(
        *(client.name, Stores, security),
        runner=None,
        send=queue.put_nowait,
        spawn=spawn,
        on_event=lambda event: None,
    )


async def serve(it, client, place, stack, *, leaves=False):
    """Answer as an agent whose statistics are made at once; it ends with the stream."""
    shell = shell_of(it, client, stack)
    authorities = Keeper(it.coordinator.config.state.parent / f"client-{client.name}" / "identity").current.ca_pem
    key, heard = None, []
    while (message := await client.control.read()) is not grpc.aio.EOF:
        kind = message.WhichOneof("message")
        if kind == "welcome":
            key = check_publisher(message.welcome.publisher, authorities, time.time())
        check_signature(message, client.name, key)
        heard.append(kind)
        if kind == "ask_statistics":
            request = event_of(message).request
            assert not shell.objection(request)
            shell.join(request, statistics_of(place))
            if leaves:
                client.control.cancel()
                return
        else:
            shell.asked(message)


@live
async def test_the_sum_of_connected_sites_is_shown_as_one_and_a_repeated_one_is_over_the_same(tmp_path):
    state = tmp_path / "state"
    async with running(
        state, coordinator__insecure=False, coordinator__lease=4, coordinator__enrol="127.0.0.1:0"
    ) as it:
        async with it.admin() as admin, AsyncExitStack() as stack:
            for place, name in enumerate("abcde"):
                client = await stack.enter_async_context(it.client(name, gives_statistics=True, joins_sessions=True))
                serving = asyncio.ensure_future(serve(it, client, place, stack, leaves=name == "e"))
                stack.callback(serving.cancel)
            while len(it.coordinator.attendance.hub) < 5:
                await asyncio.sleep(0.02)
            assert (await asking(admin, 30.0, *PLAN)).number == 1
            first = await result(admin)
            assert (await asking(admin, 30.0, *PLAN)).number == 2
            again = await result(admin)
    assert first["answered"] == again["answered"] == ["a", "b", "c", "d"]
    assert first["refused"].keys() == {"e"}
    assert (first["secure"], first["sites"]) == ({"sites": 4}, {})
    train = first["merged"]["train"]
    assert (train["examples"], train["sites"]) == (8, 4)
    assert train["labels"]["target"]["counts"] == {"0": 4, "1": 4, "other": 0}
    assert train["features"]["age"]["sum"] == 0 + 10 + 20 + 30 + 4 * 20
    assert again["merged"] == first["merged"]
    audit = "".join(path.read_text() for path in (state / "audit").glob("audit-*.jsonl"))
    assert "4 of 5 sites are in the secure sum" in audit
