"""Members by the command line alone: a coordinator, an agent and an operator elsewhere, as real processes."""

import io
import json
import os
import socket
import threading
import time
from pathlib import Path

import pytest

from atoll.cli import options
from atoll.operations.members import unknown_member
from atoll.protocol.identity.join_code import JoinCode
from atoll.protocol.identity.names import Identity, Role
from atoll.server.identity.register import Register
from atoll.server.journal.holder import running_coordinator
from atoll.server.journal.state_directory import StateDirectory
from tests.cli.federation import Federation, wait_for
from tests.cli.invoking import TINY, invoke, refused, shown, told
from tests.waiting import BOUND_S


@pytest.mark.real
def test_a_site_joins_with_a_code_and_ends_when_it_is_revoked_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = Federation(tmp_path)
    monkeypatch.setenv("ATOLL_IDENTITY", str(tmp_path / "olga"))
    try:
        it.start("coordinator", "coordinator", "--state", it.state, "--set=coordinator.listen=127.0.0.1:0")
        wait_for(lambda: running_coordinator(it.state))
        code = invoke("client", "invite", "a", "--state", it.state).stdout.strip()
        assert "is for client a, and not for owner, operator or auditor; it remains valid" in refused("join", code)[0]
        it.start("a", "agent", f"{TINY}:task", "--site", "a", "--join", code)
        invited = invoke("client", "invite", "olga", "--role", "operator", "--state", it.state).stdout.strip()
        assert shown("join", invited)["role"] == "operator"
        assert shown("join", invited)["name"] == "olga"  # once more: nothing is left to do
        other = invoke("client", "invite", "hugo", "--role", "auditor", "--state", it.state).stdout.strip()
        assert "holds the credential of operator olga: name another folder" in refused("join", other)[1]
        assert shown("join", other, "--identity", tmp_path / "hugo")["name"] == "hugo"
        rank = refused("client", "invite", "2", "--role", "aggregator", "--state", it.state)[0]
        assert rank.endswith("aggregator 2: this coordinator has no aggregation ranks; start it with --aggregators N")
        mine = ("local", "--role", "owner", "--state", it.state)
        for command in ("invite", "revoke"):
            assert "owner local is the holder of the state directory" in refused("client", command, *mine)[0]

        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        wait_for(lambda: standing().get("a") == "member")
        assert "operator olga may call" in refused("client", "invite", "eve", "--role", "owner")[0]
        mistyped_names_are_refused()
        known = invoke("client", "revoke", "a")
        assert (known.exit_code, told(known.stderr)) == (0, ["client a is revoked"])
        assert it.processes["a"].wait(BOUND_S) == 2
        assert "client a is revoked: this agent ends; it needs a new join code" in it.log("a").splitlines()[-1]
        assert standing()["a"] == "revoked"
        invoke("client", "revoke", "olga", "--role", "operator", "--state", it.state)
        assert refused("client", "members") == ["the certificate of operator olga is revoked"]
        the_same_members_are_listed_once_it_has_ended(it)
    finally:
        for process in it.processes.values():
            process.kill()
            process.wait()


def mistyped_names_are_refused() -> None:
    mistyped = refused("client", "revoke", "aa")
    assert "no client 'aa' was invited or enrolled here, so nothing is revoked: did you mean a?" in mistyped[0]
    assert (standing()["a"], standing().get("aa")) == ("member", None)
    assert "olga is operator here (--role ROLE)" in refused("client", "revoke", "olga")[0]
    assert shown("client", "revoke", "zoe", "--made-by-hand")["was_known"] is False
    assert standing()["zoe"] == "revoked"


def the_same_members_are_listed_once_it_has_ended(it: Federation) -> None:
    listed = shown("client", "members", "--state", it.state)
    it.processes["coordinator"].terminate()
    it.processes["coordinator"].wait()
    stopped = invoke("client", "members", "--state", it.state, "--json")
    assert json.loads(stopped.stdout) == listed
    assert "no coordinator listens" in stopped.stderr


def test_an_unknown_name_is_refused_with_similar_names_that_are_not_revoked() -> None:
    names = {"north": "member", "harbour": "member", "north-2": "invited", "nort": "revoked"}
    known = {(Role.CLIENT, name): standing for name, standing in names.items()} | {(Role.OPERATOR, "olga"): "member"}
    (what, way_out) = unknown_member(Role.CLIENT, "nroth", known)
    assert what.endswith("did you mean north or north-2? (known: harbour, north, north-2)")
    assert "--made-by-hand" in way_out
    assert "olga is operator here (--role ROLE)" in unknown_member(Role.CLIENT, "olga", known)[0]
    assert unknown_member(Role.AUDITOR, "xyz", known)[0].endswith("(known: none)")


def test_members_of_a_stopped_coordinator_come_from_its_database_and_its_authority(tmp_path: Path) -> None:
    state, folder = tmp_path / "state", tmp_path / "by-hand"
    with StateDirectory.open(state) as held:
        register = Register(held.database)
        register.invite(Identity(Role.CLIENT, "north"), now=time.time(), lifetime_s=3600.0)
        register.revoke(Identity(Role.CLIENT, "eve"), now=time.time())
    authority = state / "identity" / "authority"
    invoke("authority", "init", authority)
    for name, role in (("south", "client"), ("olga", "operator"), ("eve", "client")):
        assert invoke("authority", "issue", authority, name, "--role", role, "--out", folder / name).exit_code == 0
    listed = shown("client", "members", "--state", state)
    found = {(row["role"], row["name"]): row["standing"] for row in listed}
    client = {("client", "eve"): "revoked", ("client", "north"): "invited", ("client", "south"): "by hand"}
    assert found == {**client, ("operator", "olga"): "by hand"}
    south = next(row for row in listed if row["name"] == "south")
    assert south["expires_at"] - south["since"] == pytest.approx(30 * 86400, abs=60)
    with (authority / "issued.jsonl").open("ab") as log:  # a line that a crash has cut off, and one of another kind
        log.write(b'{"why": "by hand", "identity": 7, "at": 1, "until": 2}\n[]\n{"at": 1.0, "iden')
    assert shown("client", "members", "--state", state) == listed


def test_a_coordinator_that_is_stopping_is_waited_for_and_its_members_come_from_its_database(tmp_path: Path) -> None:
    state = tmp_path / "state"
    held = StateDirectory.open(state)
    Register(held.database).invite(Identity(Role.CLIENT, "north"), now=time.time(), lifetime_s=3600.0)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    held.announce(address, address, os.getpid(), insecure=True)
    assert "does not answer" in refused("client", "members", "--state", state)[0]
    ending = threading.Timer(1.0, held.close)
    ending.start()
    listed = shown("client", "members", "--state", state)
    ending.join()
    assert [(row["name"], row["standing"]) for row in listed] == [("north", "invited")]


def test_the_members_of_what_is_no_state_directory_are_refused(tmp_path: Path) -> None:
    assert "is not a state directory" in refused("client", "members", "--state", tmp_path / "none")[0]
    with StateDirectory.open(tmp_path / "insecure"):
        pass  # it has no register
    assert shown("client", "members", "--state", tmp_path / "insecure") == []


def standing() -> dict[str, str]:
    return {member["name"]: member["standing"] for member in shown("client", "members")}


def test_a_code_may_come_over_standard_input_on_several_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    code = str(JoinCode(("atoll.example.org:7071",), bytes(32), bytes(8), bytes(16)))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(f"{code[:40]}\n{code[40:]}\n".encode())))
    assert JoinCode.parse(options.read_join_code("-") or "") == JoinCode.parse(code)
    assert options.read_join_code(code) == code
    assert options.read_join_code(None) is None
