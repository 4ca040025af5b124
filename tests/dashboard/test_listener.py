"""The address of a dashboard, what is refused, and further links."""

import json
import os
from pathlib import Path

import pytest

from atoll.dashboard.access import Sessions, new_key
from atoll.dashboard.listener import Listener, announced, another_link, bound, listener_of, runtime_folder
from atoll.interface.errors import AtollError


@pytest.mark.parametrize(
    ("text", "netloc", "hosts"),
    [
        ("127.0.0.1:7080", "127.0.0.1:7080", {"127.0.0.1:7080", "localhost:7080"}),
        ("localhost:7080", "127.0.0.1:7080", {"127.0.0.1:7080", "localhost:7080"}),
        ("[::1]:7080", "[::1]:7080", {"[::1]:7080", "localhost:7080"}),
        ("[0:0:0:0:0:0:0:1]:7080", "[::1]:7080", {"[::1]:7080", "localhost:7080"}),  # as browsers write it
        ("127.0.0.1:80", "127.0.0.1", {"127.0.0.1", "localhost"}),
    ],
)
def test_loopback_is_allowed(text: str, netloc: str, hosts: set[str]) -> None:
    found = listener_of(text)
    assert (found.netloc, found.hosts) == (netloc, hosts)
    assert found.url("t") == f"http://{netloc}/login?t=t"


@pytest.mark.parametrize(
    "text", ["0.0.0.0:7080", "[::]:7080", "192.168.0.3:7080", "hub.example.org:7080", "localhost.example.org:7080"]
)
def test_other_interfaces_are_no_loopback(text: str) -> None:
    found = listener_of(text)
    assert not found.is_loopback
    assert found.netloc == text


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("127.0.0.1", "allowed: unix:PATH, or HOST:PORT"),
        ("127.0.0.1:65536", "port 0..65535"),
        ("127.0.0.1:x", "allowed: unix:PATH, or HOST:PORT"),
        ("http://127.0.0.1:7080", "allowed: unix:PATH, or HOST:PORT"),
        ("", "allowed: unix:PATH, or HOST:PORT"),
    ],
)
def test_anything_else_is_refused_by_name_with_a_way_out(text: str, why: str) -> None:
    with pytest.raises(AtollError, match=why) as refused:
        listener_of(text)
    assert f"--listen: got {text!r}; allowed: " in str(refused.value)


@pytest.mark.real
def test_a_port_in_use_is_refused() -> None:
    listening, here = bound(Listener("127.0.0.1", 0))
    with listening:
        listening.listen()
        assert here.port > 0
        with pytest.raises(AtollError, match="in use"):
            bound(here)


def test_the_owner_makes_links_while_it_runs(tmp_path: Path) -> None:
    here, key = Listener("127.0.0.1", 7099), new_key()
    with announced(here, key, tmp_path):
        (file,) = tmp_path.iterdir()
        assert file.stat().st_mode & 0o077 == 0, "others cannot read the key"
        links = {another_link(listen, tmp_path, 5.0) for listen in ("", "127.0.0.1:7099")}
        sessions = Sessions(key)
        assert all(sessions.opened_by(link.partition("?t=")[2], 6.0) for link in links)
        with pytest.raises(
            AtollError, match=r"no dashboard of yours runs here at 127.0.0.1:1 \(running: 127.0.0.1:7099"
        ):
            another_link("127.0.0.1:1", tmp_path, 5.0)
        with announced(Listener("127.0.0.1", 7098), key, tmp_path), pytest.raises(AtollError, match="name one with"):
            another_link("", tmp_path, 5.0)
    assert list(tmp_path.iterdir()) == []


def test_a_dashboard_at_a_unix_socket_has_no_link(tmp_path: Path) -> None:
    with pytest.raises(AtollError, match="its proxy lets its users in"):
        another_link("unix:/run/atoll.sock", tmp_path, 5.0)


def test_the_file_of_a_dead_process_counts_for_nothing(tmp_path: Path) -> None:
    dead = {"pid": 2**22 + 1, "host": "127.0.0.1", "port": 7080, "key": "00"}
    (tmp_path / "dead.json").write_text(json.dumps(dead))
    (tmp_path / "damaged.json").write_text("{")
    with pytest.raises(AtollError, match=r"\(running: none\): start one with `atoll dashboard`"):
        another_link("", tmp_path, 5.0)


def test_the_folder_of_the_keys_is_the_owner_s_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "atoll" / "dashboards").mkdir(parents=True)
    os.chmod(tmp_path / "atoll" / "dashboards", 0o755)
    assert runtime_folder().stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "file"))
    with pytest.raises(AtollError, match="set XDG_RUNTIME_DIR"):
        runtime_folder()
