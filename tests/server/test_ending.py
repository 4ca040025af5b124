"""A process ends in time, whatever holds it up."""

import asyncio
import signal
import socket
import subprocess
import sys
import textwrap
from itertools import chain

import grpc
import pytest

from atoll.protocol.channel import server_options
from atoll.server.ending import cut_connections, stop_servers
from benchmarks.attackers import ACK, PREFACE, SETTINGS, frame


def process(text):
    program = "from atoll.server.ending import end_in_time\n" + textwrap.dedent(text)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    "held_up",
    [
        "import time; time.sleep(600)",
        "import ctypes; ctypes.PyDLL(None).sleep(600)  # with Python's lock",
        "import atexit, time; atexit.register(time.sleep, 600)",
        "import threading, time; threading.Thread(target=time.sleep, args=(600,)).start()",
    ],
)
def test_a_process_that_is_held_up_ends_all_the_same_and_says_where_it_was(held_up):
    ended = process(f"end_in_time(1)\n{held_up}")
    assert ended.returncode == -signal.SIGALRM
    assert "most recent call first" in ended.stderr


def test_a_process_that_ends_in_time_says_nothing():
    ended = process("end_in_time(60)")
    assert (ended.returncode, ended.stderr) == (0, "")


HANGS = {
    "coordinator": "from atoll.server.coordinator import Coordinator as Held",
    "aggregator": "from atoll.server.rank import Rank as Held",
}


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("coordinator", ["coordinator.listen=127.0.0.1:0", "coordinator.admin=127.0.0.1:0"]),
        ("aggregator", ["listen=127.0.0.1:0", "coordinator=127.0.0.1:1", "rank=0", "ranks=1"]),
    ],
)
def test_a_signal_ends_what_cannot_end(command, arguments, tmp_path):
    program = f"""
import sys, time
from functools import partial
from atoll.server import ending
{HANGS[command]}
ending.end_in_time = partial(ending.end_in_time, 1)
Held.stop = lambda self: time.sleep(600)
from atoll.cli.main import run
run()
"""
    words = [
        command,
        "--insecure",
        "--state",
        str(tmp_path / "state"),
        *(f"--set={argument}" for argument in arguments),
    ]
    whole = [sys.executable, "-c", program, *words]
    with subprocess.Popen(whole, stderr=subprocess.PIPE, text=True) as started:
        assert any(line.startswith(f"atoll {command}") for line in started.stderr)
        started.terminate()
        said = started.stderr.read()
    assert started.returncode == -signal.SIGALRM
    assert "most recent call first" in said


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
            await asyncio.wait_for(stop_servers((server, port)), 60)

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
