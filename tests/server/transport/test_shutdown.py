"""Servers end in time, whatever their peers do."""

import asyncio
import socket
from itertools import chain

import grpc
import pytest

from atoll.protocol.wire.channel import server_options
from atoll.server.transport.shutdown import cut_connections, stop_servers
from benchmarks.attackers import ACK, PREFACE, SETTINGS, frame


@pytest.mark.parametrize("takes", [True, False])
def test_a_peer_that_takes_nothing_does_not_hold_up_the_end(takes, caplog):
    async def main():
        server = grpc.aio.server(options=server_options())
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        with socket.socket() as peer:
            await asyncio.to_thread(peer.connect, ("127.0.0.1", port))
            peer.setblocking(False)
            peer.sendall(PREFACE + frame(SETTINGS, 0, 0, b""))
            if not takes:
                await fill(peer)
            await asyncio.wait_for(stop_servers((server, f"127.0.0.1:{port}")), 60)

    asyncio.run(main())
    assert ("cut 1 connections" in caplog.text) is not takes
    assert "without" not in caplog.text


async def fill(peer):
    """Ask for answers, and read none, until the server cannot write any more, and reads nothing either."""
    peer.sendall(frame(SETTINGS, ACK, 0, b""))
    asked, full_for = frame(SETTINGS, 0, 0, b"") * 100, 0
    while full_for < 20:
        try:
            asked = asked[peer.send(asked) :] or frame(SETTINGS, 0, 0, b"") * 100
            full_for = 0
        except BlockingIOError:
            full_for += 1
        await asyncio.sleep(0.02 if full_for else 0)


def test_only_connections_at_the_given_ports_are_cut():
    with socket.create_server(("127.0.0.1", 0)) as ours, socket.create_server(("127.0.0.1", 0)) as others:
        pairs = [(socket.create_connection(one.getsockname()), one.accept()[0]) for one in (ours, others)]
        assert cut_connections({ours.getsockname()[1]}) == 1
        (cut, _), (spared, _) = pairs
        assert cut.recv(1) == b""
        spared.setblocking(False)
        with pytest.raises(BlockingIOError):
            spared.recv(1)
        with socket.create_connection(ours.getsockname()):
            pass  # it still listens
        for end in chain(*pairs):
            end.close()
