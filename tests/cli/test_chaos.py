"""`atoll chaos`: what is refused, and how its processes begin and end."""

import json
import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from tests.cli.invoking import refused
from tests.federation.processes import ATOLL
from tests.waiting import BOUND_S


def test_impossible_drills_are_refused_all_at_once() -> None:
    faults = refused(
        *("chaos", "proxy", "--listen", "0.0.0.0:0", "--to", "example.org", "--latency", "-1", "--half-open", "0.5")
    )
    assert faults == [
        "latency = -1: allowed: 0 or more, and finite",
        "half-open = 0.5 is a share of the cuts, and there are none: add --cut-every",
        "address '0.0.0.0:0': allowed: 127.0.0.1, localhost or [::1], or any with --anywhere",
        "address 'example.org': allowed: host:port, with a port in 0..65535",
    ]
    assert refused("chaos", "kill", "--pidfile", "none", "--every", "0", "--for", "inf") == [
        "--every 0: allowed: seconds above 0, and finite",
        "--for inf: allowed: seconds above 0, and finite",
    ]


def test_a_port_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as used:
        address = f"127.0.0.1:{used.getsockname()[1]}"
        (fault,) = refused("chaos", "proxy", "--listen", address, "--to", "127.0.0.1:1")
    assert fault == f"--listen {address}: Address already in use: choose another port"


@pytest.mark.real
def test_a_line_tells_what_it_does_and_ends_by_a_signal() -> None:
    with socket.create_server(("127.0.0.1", 0)) as far:
        command = [ATOLL, "chaos", "proxy", "--listen", "127.0.0.1:0", "--to", f"127.0.0.1:{far.getsockname()[1]}"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            begun = json.loads(process.stdout.readline())
            assert begun["did"] == "listening"
            with socket.create_connection(begun["address"].split(":"), timeout=BOUND_S) as near:
                near.sendall(b"hello")
                with far.accept()[0] as other:
                    other.settimeout(BOUND_S)
                    assert other.recv(5, socket.MSG_WAITALL) == b"hello"
                    assert json.loads(process.stdout.readline())["did"] == "connected"
            assert json.loads(process.stdout.readline()).items() >= {"did": "ended", "up": 5, "down": 0}.items()
            process.send_signal(signal.SIGTERM)
            assert process.wait(BOUND_S) == 0
            assert process.stdout.read() == ""
        finally:
            process.kill()
            process.wait()
            process.stdout.close()  # type: ignore[union-attr]


@pytest.mark.real
def test_kills_tell_what_they_did(tmp_path: Path) -> None:
    (tmp_path / "pid").write_text(str(os.getpid() + 2**22))
    command = [ATOLL, "chaos", "kill", "--pidfile", tmp_path / "pid", "--every", "0.01", "--for", "0.1"]
    lines = [json.loads(line) for line in subprocess.check_output(command, text=True).splitlines()]
    assert {line["did"] for line in lines[:-1]} == {"nothing"}
    assert "has ended" in lines[0]["why"]
    assert (lines[-1]["did"], lines[-1]["killed"]) == ("done", 0)
