"""`atoll dashboard` as a process: a real socket, its priority, its modules, its link, and its end."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import pytest

from tests.cli.invoking import invoke, refused
from tests.waiting import BOUND_S

pytestmark = pytest.mark.real

PROGRAM = """
import atexit, json, os, sys
atexit.register(lambda: print("MODULES", json.dumps(sorted(sys.modules)), os.nice(0)))
from atoll.cli.main import run
run()
"""


@contextmanager
def dashboard(*arguments: str, home: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A dashboard for a block, and the link that it prints; by default it listens on loopback."""
    listen = () if "--listen" in arguments else ("--listen", "127.0.0.1:0")
    command = [sys.executable, "-c", PROGRAM, "dashboard", *arguments, *listen]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(home)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env=environment, **pipes) as process:  # type: ignore[call-overload]
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def get(link: str, path: str, cookie: str = "", method: str = "GET") -> tuple[int, str, str]:
    """Return status, cookie and body of an answer."""
    connection = HTTPConnection(urlsplit(link).netloc, timeout=BOUND_S)
    try:
        connection.request(method, path, headers={"Cookie": cookie} if cookie else {})
        answer = connection.getresponse()
        return answer.status, (answer.getheader("set-cookie") or "").partition(";")[0], answer.read().decode()
    finally:
        connection.close()


def exchanged(link: str, path: str, cookie: str, fields: dict[str, str]) -> tuple[int, str]:
    """Return status and body of the answer to a form."""
    netloc = urlsplit(link).netloc
    connection = HTTPConnection(netloc, timeout=BOUND_S)
    headers = {"Cookie": cookie, "Origin": f"http://{netloc}", "Content-Type": "application/x-www-form-urlencoded"}
    try:
        connection.request("POST", path, urlencode(fields), headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_a_link_opens_the_pages_of_a_nice_process_without_torch(
    places: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with dashboard(*places, home=tmp_path) as (process, link):
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
        assert get(link, "/")[0] == 403
        status, cookie, _ = get(link, link.partition(urlsplit(link).netloc)[2])
        assert status == 200
        status, _, page = get(link, "/", cookie)
        assert status == 200
        assert "many-1" in page
        assert get(link, "/runs/2/many-1", cookie)[0] == get(link, "/runs/3/one", cookie)[0] == 200
        assert get(link, "/", cookie, "POST")[0] == 403
        port = urlsplit(link).port
        another = invoke("dashboard", "link").stdout.strip()
        assert urlsplit(another).port == port
        assert get(link, another.partition(f":{port}")[2])[0] == 200
        assert get(link, another.partition(f":{port}")[2])[0] == 403, "it was used"
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=BOUND_S)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    assert link not in err, "a log keeps no secret"
    (line,) = [line for line in out.splitlines() if line.startswith("MODULES ")]
    modules, nice = line.removeprefix("MODULES ").rsplit(" ", 1)
    assert int(nice) >= 10
    assert {"torch", "numpy"}.isdisjoint(json.loads(modules))
    assert refused("dashboard", "link") == [
        "no dashboard of yours runs here (running: none): start one with `atoll dashboard`"
    ]


def test_a_mistake_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ATOLL_IDENTITY", str(tmp_path / "none"))
    monkeypatch.setattr("os.nice", lambda _: 0)
    (tmp_path / "empty").mkdir()
    (nothing,) = refused("dashboard")
    assert nothing.startswith("there is nothing to show here")
    faults = refused("dashboard", "gone", "empty")
    assert [fault.partition(":")[0] for fault in faults] == ["gone", "empty"]
    (tmp_path / "simulated").mkdir()
    (tmp_path / "simulated" / "rounds.jsonl").touch()
    header, users = refused("dashboard", "simulated", "--listen", "unix:atoll.sock")
    assert header.startswith("--user-header: got ''; allowed: the header in which the proxy")
    assert users.startswith("--users: got ''; allowed: a file, for a listener at a Unix socket")
    (fault,) = refused("dashboard", "simulated", "--user-header", "X-User")
    assert "with --listen unix:PATH, where a proxy alone connects" in fault


def test_a_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in ("starlette", "jinja2") else 1)
    assert refused("dashboard") == [
        "atoll dashboard needs starlette, jinja2, which this Python lacks: pip install 'atoll[dashboard]'"
    ]
