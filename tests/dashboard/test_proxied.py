"""The listener behind a proxy: its socket, its users with their roles, and the header that counts there alone."""

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import pytest
from starlette.testclient import TestClient

from atoll.dashboard.access import LoopbackDoor, Sessions, new_key
from atoll.dashboard.app import Dashboard
from atoll.dashboard.proxied import ProxyDoor, Users, header_of, known_in, listening_at, path_of
from atoll.dashboard.sources import sources
from atoll.interface.errors import AtollError
from atoll.interface.roles import check_role
from atoll.operations import admin
from tests.dashboard.test_process import dashboard
from tests.waiting import BOUND_S

HOST = "fl.example.org"
HEADER = "X-Forwarded-User"
ORIGIN = MappingProxyType({"origin": f"https://{HOST}"})
USERS = f'hosts = ["{HOST}"]\n[users]\n"ann@x" = "owner"\n"olga@x" = "operator"\n"bob" = "auditor"\n"é" = "auditor"\n'
RUN, MEMBERS = "/runs/1/r/control", "/members/1/control"


@pytest.fixture
def users(tmp_path: Path) -> Path:
    path = tmp_path / "users.toml"
    path.write_text(USERS, "utf-8")
    path.chmod(0o640)
    return path


@pytest.fixture
def client(places: list[str], users: Path, monkeypatch: pytest.MonkeyPatch) -> TestClient:
    monkeypatch.setattr(admin, "STARTING_S", 0.0)  # no coordinator holds these directories
    app = Dashboard(sources(places), is_controlled=True).app(ProxyDoor(Users(str(users)), header_of(HEADER)))
    return TestClient(app, base_url=f"https://{HOST}")


def test_the_proxy_names_one_user_that_has_a_role(client: TestClient, users: Path) -> None:
    for name in ("ann@x", "olga@x", "bob", "é"):
        assert client.get("/", headers={HEADER: name.encode()}).status_code == 200, name
    for name in ("", "eve", "BOB", "bob, ann@x", "ann@x\u00a0", "*"):
        assert client.get("/", headers={HEADER: name.encode()}).status_code == 403, name
    assert client.get("/").status_code == 403
    twice = [(HEADER.lower(), "bob"), (HEADER, "ann@x")]
    assert client.get("/", headers=twice).status_code == 403
    assert client.get("/", headers={HEADER.replace("-", "_"): "ann@x"}).status_code == 403
    for host in ("evil.example", f"{HOST}.evil.example", f"{HOST}:444", "127.0.0.1", ""):
        answer = client.get("/", headers={HEADER: "bob", "host": host})
        assert (answer.status_code, answer.text.startswith(f"{host!r} is no address")) == (403, True)
    assert client.get("/login", headers={HEADER: "bob"}).status_code == 404
    users.write_text(USERS.replace('"bob" = "auditor"\n', ""), "utf-8")
    assert client.get("/", headers={HEADER: "bob"}).status_code == 403, "at the next request"
    users.write_text("[users")
    assert client.get("/", headers={HEADER: "ann@x"}).status_code == 403
    users.unlink()
    assert client.get("/", headers={HEADER: "ann@x"}).status_code == 403


def token_of(client: TestClient, name: str, page: str = RUN) -> str:
    return str(re.findall(r'name="token" value="(\w+)"', client.get(page, headers={HEADER: name}).text)[0])


def test_an_auditor_changes_nothing(client: TestClient) -> None:
    for page in (RUN, MEMBERS, f"{MEMBERS}/revoke?role=client&name=a"):
        assert client.get(page, headers={HEADER: "bob"}).status_code == 403
        assert client.get(page, headers={HEADER: "olga@x"}).status_code in (200, 404)
    for path in (f"{RUN}/pause", f"{RUN}/stop", f"{MEMBERS}/invite"):
        for token in (token_of(client, "ann@x"), ""):
            answer = client.post(path, data={"token": token}, headers={**ORIGIN, HEADER: "bob"})
            assert answer.status_code == 403


def test_a_form_is_its_user_s_and_comes_from_the_proxy_s_pages(client: TestClient) -> None:
    given = {"token": token_of(client, "olga@x")}
    path, olga = f"{RUN}/pause", {HEADER: "olga@x"}
    for origin in (f"https://{HOST}", f"http://{HOST}"):
        answer = client.post(path, data=given, headers={**olga, "origin": origin})
        assert (answer.status_code, "no coordinator holds" in answer.text) == (400, True)
    assert client.post(path, data=given, headers=olga).status_code == 403
    for origin in ("https://evil.example", "null", f"https://{HOST}:8443"):
        assert client.post(path, data=given, headers={**olga, "origin": origin}).status_code == 403
    assert client.post(path, data=given, headers={**ORIGIN, HEADER: "ann@x"}).status_code == 403, "another's token"


@pytest.mark.parametrize(
    ("query", "role", "status"),
    [
        ("", "client", 400),
        ("", "aggregator", 400),
        ("", "owner", 403),
        ("", "operator", 403),
        ("", "auditor", 403),
        ("?role=owner", "client", 403),
        ("?role=owner&role=client", "owner", 400),
        ("?role=client", "owner", 400),
    ],
)
def test_an_operator_invites_and_revokes_sites_alone(
    client: TestClient, query: str, role: str, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "atoll.dashboard.control")
    given = {"token": token_of(client, "olga@x"), "role": role, "name": "x", "typed": "x", "hours": "1"}
    for act in ("invite", "revoke"):
        answer = client.post(f"{MEMBERS}/{act}{query}", data=given, headers={**ORIGIN, HEADER: "olga@x"})
        assert answer.status_code == status, answer.text
        assert re.fullmatch(rf"olga@x \(operator\): {act} of \w+ x is refused", caplog.messages[-1])
        if status == 400 and role == "owner":  # the address names the client that is meant
            assert "owner x" not in answer.text
    ann = given | {"token": token_of(client, "ann@x")}
    assert client.post(f"{MEMBERS}/invite", data=ann, headers={**ORIGIN, HEADER: "ann@x"}).status_code == 400


def test_the_header_means_nothing_on_loopback(places: list[str]) -> None:
    door = LoopbackDoor(Sessions(new_key()), {"127.0.0.1:7080"}, lambda: 0.0, "c")
    stranger = TestClient(Dashboard(sources(places)).app(door), base_url="http://127.0.0.1:7080")
    assert stranger.get("/", headers={HEADER: "ann@x", "X-Forwarded-For": "127.0.0.1"}).status_code == 403


def test_roles_follow_the_rules_of_the_coordinator() -> None:
    check_role("operator", "Invite", "client")
    check_role("owner", "Invite", "owner")
    for role, method, of in (
        ("operator", "Invite", "owner"),
        ("operator", "Revoke", ""),
        ("auditor", "PauseRun", ""),
        ("operator", "DeleteRun", ""),
        ("client", "PauseRun", ""),
        ("pope", "PauseRun", ""),
        ("owner", "Unknown", ""),
    ):
        with pytest.raises(AtollError, match=f"the role {role} "):
            check_role(role, method, of)


@pytest.mark.parametrize(
    ("content", "faults"),
    [
        ("", ["hosts", "users"]),
        ("hosts = []\n[users]\n", ["hosts", "users"]),
        ('hosts = "x"\n[users]\na = "owner"', ["hosts"]),
        ('hosts = ["x"]\n[users]\na = "pope"\nb = 1\nc = "client"', ["a", "b", "c"]),
        ('host = "x"\nhosts = ["x"]\n[users]\na = "owner"', ["host is unknown"]),
        ("[users", ["no TOML"]),
        ("\xff", ["no TOML"]),
    ],
)
def test_all_faults_of_the_file_are_told(content: str, faults: list[str]) -> None:
    with pytest.raises(AtollError) as refused:
        known_in(content.encode("latin-1"))
    assert len(refused.value.faults) == len(faults)
    for fault, what in zip(refused.value.faults, faults, strict=True):
        assert fault.startswith(f"--users: {what}")


def test_a_file_that_others_may_change_is_refused(users: Path, tmp_path: Path) -> None:
    for mode in (0o660, 0o602):
        users.chmod(mode)
        with pytest.raises(AtollError, match="others may change"):
            Users(str(users))
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(AtollError, match="cannot be read"):
            Users(str(path))


@pytest.mark.parametrize("name", ["", "X User", "X:User", "Host", "cookie", "X_User", "ü", "X-User\n"])
def test_a_header_has_a_name_of_its_own(name: str) -> None:
    with pytest.raises(AtollError, match="--user-header: got"):
        header_of(name)


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.real
@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o600), (0o077, 0o600), (0o007, 0o660), (0o002, 0o660), (0, 0o660)])
def test_a_socket_is_its_owner_s_or_by_umask_its_group_s(tmp_path: Path, mask: int, mode: int) -> None:
    path = tmp_path / "s"
    with umask(mask), listening_at(path) as listening:
        assert path.lstat().st_mode & 0o777 == mode
        with socket.socket(socket.AF_UNIX) as other:
            other.connect(str(path))
            listening.accept()[0].close()
        with pytest.raises(AtollError, match="another process listens there"), listening_at(path):
            pass
        assert path.is_socket()
    assert not path.exists()


@pytest.mark.real
def test_a_stale_socket_is_replaced_and_nothing_else_is(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with listening_at(path):
        assert path.is_socket()
    target = tmp_path / "target"
    for make in (
        lambda: path.write_text("mine"),
        lambda: path.symlink_to(target),
        lambda: path.symlink_to(tmp_path / "live"),
        path.mkdir,
    ):
        make()
        with listening_at(tmp_path / "live"), pytest.raises(AtollError, match="something else is"):
            with listening_at(path):
                pass
        assert os.path.lexists(path)
        path.rmdir() if path.is_dir() else path.unlink()
    assert not target.exists()


def test_a_folder_in_which_others_may_replace_files_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(AtollError, match="others may replace files"), listening_at(folder / "s"):
        pass
    with pytest.raises(AtollError, match="No such file"), listening_at(tmp_path / "none" / "s"):
        pass
    assert path_of("unix:x") == Path("x")
    for path in ("", "a\0b", "x" * 108):
        with pytest.raises(AtollError, match="--listen: got"):
            path_of(f"unix:{path}")


def asked(path: Path, name: str, target: str = "/", encoding: str = "utf-8") -> bytes:
    """Return the answer to a request of a proxy."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(BOUND_S)
        connection.connect(str(path))
        request = f"GET {target} HTTP/1.1\r\nHost: {HOST}\r\n{HEADER}: {name}\r\nConnection: close\r\n\r\n"
        connection.sendall(request.encode(encoding))
        return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.mark.real
def test_a_process_serves_a_proxy_at_its_socket_and_removes_it(places: list[str], users: Path, tmp_path: Path) -> None:
    path = tmp_path / "atoll.sock"
    given = (*places, "--listen", f"unix:{path}", "--user-header", HEADER, "--users", str(users), "--control")
    with dashboard(*given, home=tmp_path) as (process, printed):
        assert printed == f"unix:{path}"
        assert path.lstat().st_mode & 0o777 == 0o600
        assert b"many-1" in asked(path, "bob")
        assert asked(path, "é").startswith(b"HTTP/1.1 200")
        assert asked(path, "é", encoding="latin-1").startswith(b"HTTP/1.1 403")
        assert asked(path, "eve").startswith(b"HTTP/1.1 403")
        assert b"Pause" in asked(path, "ann@x", "/runs/1/r/control")
        process.terminate()
        _, err = process.communicate(timeout=BOUND_S)
    assert process.returncode == 0, err
    assert not path.exists()
