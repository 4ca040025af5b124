"""Members by the command line alone: a coordinator, an agent and an operator elsewhere, as real processes."""

import io
from pathlib import Path

import pytest

from atoll.cli import options
from atoll.cli.members.clients import similar_names, unknown_name
from atoll.protocol.identity.join_code import JoinCode
from atoll.protocol.identity.names import Role
from atoll.server.journal.state_directory import running_coordinator
from tests.cli.federation import Federation, wait_for
from tests.cli.invoking import TINY, invoke, refused, shown


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
        assert "is for client a, and not for owner, operator or auditor; it stays good" in refused("join", code)[0]
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
        mistyped = invoke("client", "revoke", "aa")
        assert (mistyped.exit_code, standing()["a"]) == (0, "member")
        assert "but no client of this name was invited or enrolled here" in mistyped.stderr
        assert "Did you mean a, which is not revoked?" in mistyped.stderr
        known = invoke("client", "revoke", "a")
        assert (known.exit_code, known.stderr.strip()) == (0, "client a is revoked")
        assert it.processes["a"].wait(20) == 2
        assert "client a is revoked: this agent ends; it takes a new join code" in it.log("a").splitlines()[-1]
        assert standing()["a"] == "revoked"
        invoke("client", "revoke", "olga", "--role", "operator", "--state", it.state)
        assert refused("client", "members") == ["the certificate of operator olga is revoked"]
    finally:
        for process in it.processes.values():
            process.kill()
            process.wait()


def test_a_revoked_name_that_is_unknown_comes_with_similar_names() -> None:
    known = {"north": "member", "harbour": "member", "north-2": "invited", "nort": "revoked"}
    assert similar_names("nroth", known) == ["north", "north-2"]
    assert similar_names("north", known) == []
    assert unknown_name(Role.CLIENT, "nroth", known).endswith(" Did you mean north or north-2, which is not revoked?")
    assert unknown_name(Role.CLIENT, "xyz", known).endswith("those made for it by hand.")


def standing() -> dict[str, str]:
    return {member["name"]: member["standing"] for member in shown("client", "members")}


def test_a_code_may_come_over_standard_input_on_several_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    code = str(JoinCode(("atoll.example.org:7071",), bytes(32), bytes(8), bytes(16)))
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{code[:40]}\n{code[40:]}\n"))
    assert JoinCode.parse(options.read_join_code("-") or "") == JoinCode.parse(code)
    assert options.read_join_code(code) == code
    assert options.read_join_code(None) is None
