"""The control line: what passes, what a peer without the secret gets, and the end of either side."""

import json
import os
import queue
import socket
import threading

import pytest

from atoll.parallel.launch import line as lines
from atoll.parallel.launch.line import LINE, Listener, Place, dial
from tests.waiting import BOUND_S


class Supervisor:
    """What has come over the lines of a folder."""

    def __init__(self, folder, listen=""):
        self.lines, self.messages = queue.SimpleQueue(), queue.SimpleQueue()
        self.listener = Listener(folder, self._on_line, listen)

    def _on_line(self, line, hello):
        self.lines.put((line, hello))
        for message in line.messages():
            self.messages.put(message)
        self.messages.put(None)


@pytest.fixture(params=["", "127.0.0.1:0"], ids=["unix", "tcp"])
def supervisor(request, tmp_path):
    it = Supervisor(tmp_path, request.param)
    yield it
    it.listener.close()


def test_messages_pass_in_both_directions_until_one_end_is_gone(supervisor, tmp_path):
    mine = dial(tmp_path, {"ranks": 4}, BOUND_S)
    theirs, hello = supervisor.lines.get(timeout=BOUND_S)
    assert hello == {"ranks": 4}
    text = "é\n" * 100_000
    mine.send({"answer": text, "loss": float("nan")})
    assert supervisor.messages.get(timeout=BOUND_S) == {"answer": text, "loss": None, "not_finite": {"loss": "NaN"}}
    found = mine.messages()
    theirs.send({"op": "stop"})
    assert next(found) == {"op": "stop"}
    theirs.close()
    assert next(found, None) is None
    mine.tell({"late": True})
    assert supervisor.messages.get(timeout=BOUND_S) is None


def test_a_peer_without_the_secret_gets_no_line(supervisor, tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "PROVE_S", 1.0)
    right = Place.read(tmp_path)
    Place(right.address, "0" * 64).write(tmp_path)
    with pytest.raises(TimeoutError, match="nothing answers"):
        dial(tmp_path, {}, 0.0)
    assert supervisor.lines.empty()
    right.write(tmp_path)
    dial(tmp_path, {"me": 1}, BOUND_S)
    assert supervisor.lines.get(timeout=BOUND_S)[1] == {"me": 1}


def test_a_silent_or_noisy_peer_keeps_no_other_one_waiting(supervisor, tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "PROVE_S", 4 * BOUND_S)
    address = Place.read(tmp_path).address
    for noise in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64):
        if address.startswith("unix:"):
            peer = socket.socket(socket.AF_UNIX)
            peer.connect(address[5:])
        else:
            peer = socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])))
        peer.sendall(noise)
        dial(tmp_path, {}, BOUND_S)
        supervisor.lines.get(timeout=BOUND_S)
        peer.close()


def test_the_address_is_for_this_user_alone_and_a_later_supervisor_replaces_it(tmp_path):
    first = Supervisor(tmp_path)
    assert os.stat(tmp_path / LINE).st_mode & 0o777 == 0o600
    before = json.loads((tmp_path / LINE).read_text())
    first.listener.close()
    found = queue.SimpleQueue()
    threading.Thread(target=lambda: found.put(dial(tmp_path, {}, BOUND_S)), daemon=True).start()
    second = Supervisor(tmp_path)
    found.get(timeout=BOUND_S)
    second.lines.get(timeout=BOUND_S)
    assert json.loads((tmp_path / LINE).read_text())["secret"] != before["secret"]
    second.listener.close()
