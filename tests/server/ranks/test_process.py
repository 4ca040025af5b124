"""The messages of a rank's process to the coordinator."""

import asyncio

import grpc

from atoll.protocol import atoll_pb2 as pb
from atoll.protocol import services as rpc
from atoll.server.ranks.process import _Orders
from tests.waiting import BOUND_S

AT_ONCE = 50


class Listening:
    """A coordinator that collects everything that a rank sends."""

    def __init__(self):
        self.heard, self.all_here = [], asyncio.Event()

    async def Serve(self, requests, context):
        async for message in requests:
            self.heard.append(message.fold_failed.attempt)
            if len(self.heard) == AT_ONCE:
                self.all_here.set()
                return
        yield pb.RankOrder()


async def say_at_once():
    server, listening = grpc.aio.server(), Listening()
    rpc.add_servicer(listening, server, "Aggregation")
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            orders = _Orders(None, rpc.Stub(channel, "Aggregation").Serve())
            failures = [pb.RankMessage(fold_failed=pb.FoldFailed(attempt=number)) for number in range(AT_ONCE)]
            await asyncio.gather(*map(orders._send, failures))
            async with asyncio.timeout(BOUND_S):
                await listening.all_here.wait()
    finally:
        await server.stop(0)
    return listening.heard


def test_reports_and_answers_of_folds_that_are_sent_at_once_all_arrive():
    """The stream takes one message after the other; a lost answer is a fold that never ends."""
    assert asyncio.run(say_at_once()) == list(range(AT_ONCE))
