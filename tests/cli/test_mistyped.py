"""Mistyped command lines: each ends with exit code 2 and one sentence or more that name the wrong value."""

import os
from pathlib import Path

import pytest

from atoll.client.policy.history import PolicyHistory
from atoll.server.journal.state_directory import StateDirectory
from tests.cli.invoking import TINY, invoke

MISTYPED = """
new !empty
coordinator !folder
coordinator !folder.toml
coordinator !missing.toml
coordinator !empty.toml
coordinator !binary.toml
coordinator !latin.toml
coordinator !deep.toml
coordinator !bom.toml --check
coordinator !empty.py:task --check
coordinator !binary.py:task --check
coordinator !syntax.py:task --check
coordinator T --state !empty --check
coordinator T --state !empty --set coordinator.listen=127.0.0.1:0
coordinator T --state !badstate --set coordinator.listen=127.0.0.1:0
coordinator T --aggregators !-1
coordinator T --aggregators !99999999999999999999
coordinator T --set !rounds=nan
coordinator T --set !rounds=99999999999999999999999999
coordinator T --set !round.deadline=nan
coordinator T --set !round.deadline=-1
coordinator T --set !coordinator.listen=localhost:99999
coordinator T --set !coordinator.listen=:0
coordinator T --set !name=a/b
coordinator T --set !=3
coordinator T --database !mysql://x/y
coordinator T --database !nonsense
agent T --site !ü
agent T --site !a/b
agent T --site a --coordinator !nowhere
agent T --site a --policy !missing.toml
agent T --site a --policy !folder
agent T --site a --policy !binary.toml
agent T --site a --config !folder
agent T --site a --config !binary.toml
agent T --site a --config empty.toml --state !empty --insecure
agent T --site a --state !empty --insecure --coordinator 127.0.0.1:1
agent !folder.py:task --site a --check
agent !empty.py:task --site a --check
agent !binary.py:task --site a --check
aggregator --rank !-1 --of 2 --state r
aggregator --rank !2 --of 2 --state r
aggregator --rank 0 --of !0 --state r
aggregator --rank 0 --of 1 --state !empty --insecure --coordinator 127.0.0.1:1
aggregator --rank 0 --of 1 --state r --listen !nonsense --insecure
aggregator --rank 0 --of 1 --state r --config !binary.toml
simulate !missing.toml
simulate !folder.toml
simulate !binary.toml
simulate T --rounds !-1
simulate T --rounds !0
simulate T --clients !0
simulate T --clients !99999999999999999999
simulate T --engine !warp
simulate T --seed !-1
simulate T --out !empty
train !T --epochs 0
train T --device !tpu
train T --nproc !0
compare !missing.toml
compare !binary.toml
compare !T
sweep !missing.toml
sweep !folder
sweep !folder.toml
sweep !empty.toml
sweep !binary.toml
sweep !bom.toml
sweep !deep.toml
backup !missing out.tar
backup !empty out.tar
backup !folder out.tar
backup !badstate out.tar
backup !emptystate out.tar
backup state !empty
backup state !missing/out.tar
restore missing !back
restore empty !back
restore binary !back
restore folder !back
restore empty.toml !state
plan !nonsense
plan !missing.toml
plan !folder.toml
plan !binary.toml
plan llama-8b --batch !0
plan llama-8b --batch !-4
plan llama-8b --mesh !dp=0
plan llama-8b --mesh !nonsense
plan llama-8b --cluster !nonsense
plan llama-8b --precision !fp8
plan llama-8b --optimizer !lion
plan llama-8b --count !x
plan llama-8b --dry-run !x
plan llama-8b --dry-run !99
population !missing.toml
population !T
population T --config !missing.toml
population !T --config folder
settings !nonsense
run start !missing.toml
run start !folder.toml
run start !binary.toml
run start !nonsense
run start T --state !missing
run start T --state !empty
run stop '' --state !state
run stop a/b --state !state
run stop ünï --state !state
run show !nope --state state
run show nope --state !empty
run show nope --state !badstate
run show nope --state !emptystate
run show !'' --state state
run delete !nope --state state
run list --state !missing
run list --state !badstate
run list --state !empty
run list --database !nonsense
round list --state !state
round list --run !nope --state state
round show 99 --state !state
round show !99999999999999999999 --state state
round show !x --state state
client list --state !state
client list --run !nope --state state
client invite !''
client invite !ü
client invite a --hours !inf
client invite a --hours !x
client invite a --role !king
client revoke !''
client members --state !empty
client members --state !badstate
client members --state !emptystate
authority init !empty
authority show !missing
authority show !empty
authority show !folder
authority request empty --out !r
authority request cred --out !folder
authority request cred2 --out !missing/r
authority issue missing !a --out x
authority issue AUTH !a/b --out x
authority issue AUTH a --out !empty
authority issue AUTH a --out x --request !missing
authority issue AUTH a --out x --request !folder
authority issue AUTH a --out x --request !empty
authority issue AUTH a --out x --request !binary
authority issue AUTH a --out !folder --request cred.req
authority install cred !missing
authority install cred !folder
authority install cred !empty
authority install cred !binary
authority install cred cred.req --admin !nonsense
authority serve !missing --coordinator localhost:1
authority serve AUTH --coordinator !nonsense
authority serve AUTH --coordinator !localhost:0
model list --state !state
model list --state !missing
model list --run !nope --state state
model export --out !folder --state state
model export --out !missing/x --state state
rank list --state !missing
rank list --state !state
site list --state !missing
site list --state !empty
site list --state !badagent
site approve !nope --state empty-agent
site approve !'' --state empty-agent
site reject !nope --state empty-agent
site forget !nope --state empty-agent
site accept-rollback !nope --state empty-agent
site accept-rollback !nope --state badagent
audit verify --state !missing
audit verify --state !state
audit verify !missing
audit verify !folder
audit verify --checkpoint !nonsense
audit verify empty --key !missing
audit verify empty --key !folder
audit verify empty --key !binary
audit show !missing
audit show !folder
audit show --action !nonsense binary
audit export !missing
audit export --since !nonsense
audit export --since !2026-13-45
audit export binary --out !empty
audit export binary --out !missing/x
audit export binary --out !folder
plan layers=!1000000,hidden=4096,heads=32,vocab=32000
plan layers=!nan,hidden=1,heads=1,vocab=1
plan llama-8b,sequence=!-1
train !missing.py:task
train !folder.py:task
"""
"""One command line each; `!` marks the wrong word, or its wrong end, which the message must have. T: a task."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of files that are empty, binary or damaged, of folders with the names of files, and some sound ones."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ATOLL_IDENTITY", str(tmp_path / "nobody"))
    monkeypatch.setenv("COLUMNS", "200")  # or the frame of a message breaks the value in two
    noise, text = bytes(range(256)) * 4, b"no database at all, but a text of some length. " * 50
    for name in ("empty", "empty.toml", "empty.py", "emptystate/state.db"):
        _write(name, b"")
    for name in ("binary", "binary.toml", "binary.py"):
        _write(name, noise)
    for name in ("badstate/state.db", "badagent/policy.db"):
        _write(name, text)
    for name in ("folder", "folder.toml", "folder.py", "empty-agent"):
        (tmp_path / name).mkdir()
    _write("bom.toml", b"\xef\xbb\xbf" + f'task = "{TINY}:task"\nrounds = -3\n'.encode())
    _write("latin.toml", 'task = "r\xe9seau.py:task"\n'.encode("latin-1"))
    _write("deep.toml", b"a=" + b"[" * 5000 + b"]" * 5000)
    _write("syntax.py", b"def :\n")
    StateDirectory.open(tmp_path / "state").close()
    PolicyHistory(tmp_path / "empty-agent").close()
    return tmp_path


def _write(name: str, content: bytes) -> None:
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_bytes(content)


@pytest.mark.parametrize("line", MISTYPED.strip().splitlines())
def test_a_mistyped_command_line_is_refused_with_its_wrong_value(line: str, folder: Path) -> None:
    if "AUTH" in line:
        assert invoke("authority", "init", "AUTH").exit_code == 0
    if "cred" in line:
        assert invoke("authority", "request", "cred", "--out", "cred.req").exit_code == 0
    words = [word.replace("T", f"{TINY}:task") if word == "T" else word.replace("''", "") for word in line.split(" ")]
    wrong = next(word.partition("!")[2] for word in words if "!" in word).partition(",")[0]
    before = sorted(os.listdir(folder))
    result = invoke(*(word.replace("!", "") for word in words))
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    assert "Errno" not in result.output
    assert _named(wrong) in " ".join(result.stderr.split()), result.stderr
    assert set(os.listdir(folder)) - set(before) <= {"x", "r", "cred2", "atoll-agent-a", "__pycache__"}


def _named(wrong: str) -> str:
    """Return the text that names a wrong word: of `key=value` the value, of a long number its first digits."""
    value = wrong.rpartition("=")[2] if wrong.startswith(("coordinator.", "round", "name")) else wrong
    return value.removesuffix(":task") or "''"
