"""Every kind of file that a person writes, in every command that reads one, as editors on other systems save it."""

import codecs
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from typer.testing import CliRunner

from atoll.cli.commands import app
from atoll.protocol.audit.files import AuditUnusable, public_key
from atoll.protocol.identity.certificates import CertificateError, key_to_pem, new_key, read_certificates, read_key
from atoll.server.errors import StoreCorrupted
from atoll.server.identity.authority import Authority
from atoll.server.identity.signing import KEY, publisher_key
from examples.datasets.folder import BadData, read_checked
from examples.datasets.leaf import _users_of
from examples.datasets.table import Columns, read_table
from tests.cli.invoking import TINY, invoke, told

RUN = f'task = "{TINY}:task"\r\nrounds = 3\r\n'
FILES: dict[str, str] = {
    "run.toml": RUN,
    "host.toml": '[coordinator]\r\nlisten = "127.0.0.1:0"\r\n',
    "population.toml": 'task = "digits.py:task"\r\n[population]\r\nkind = "iid"\r\nclients = 4\r\n',
    "grid.toml": RUN + "[grid]\r\nseed = [1, 2]\r\n",
    "agent.toml": 'site = "north"\r\ncoordinator = "127.0.0.1:1"\r\n',
    "policy.toml": 'label = "a site"\r\n',
    "rank.toml": 'rank = 0\r\nranks = 1\r\ncoordinator = "127.0.0.1:1"\r\nstate = "rank"\r\n',
    "plan.toml": '[model]\r\npreset = "llama-8b"\r\n',
    "task.py": "\r\n".join(["from tests.wire.tasks.four_numbers_task import *", ""]),
    "trace.csv": "client,start,end\r\nnorth,0,10\r\n",
}
COMMANDS: dict[str, tuple[str, ...]] = {
    "coordinator": ("run.toml", "coordinator", "run.toml", "--check"),
    "coordinator of a host": ("host.toml", "coordinator", "host.toml", "--check"),
    "run start": ("run.toml", "run", "start", "run.toml"),
    "simulate": ("run.toml", "simulate", "run.toml", "--check"),
    "simulate of a task": ("task.py", "simulate", "task.py:task", "--check"),
    "train": ("task.py", "train", "task.py:task"),
    "agent of a task": ("task.py", "agent", "task.py:task", "--site", "a", "--insecure", "--check"),
    "simulate with clients": ("run.toml", "simulate", "run.toml", "--clients", "2", "--check"),
    "simulate with a trace": (
        *("trace.csv", "simulate", f"{TINY}:task", "--check"),
        *("--set", "devices.availability=trace", "--set", "devices.awake_trace=trace.csv"),
    ),
    "compare": ("run.toml", "compare", "run.toml"),
    "population": ("run.toml", "population", "run.toml"),
    "population of a task": ("run.toml", "population", f"{TINY}:task", "--config", "run.toml"),
    "sweep": ("grid.toml", "sweep", "grid.toml", "--check"),
    "agent": ("agent.toml", "agent", f"{TINY}:task", "--config", "agent.toml", "--check"),
    "agent's policy": (
        *("policy.toml", "agent", f"{TINY}:task", "--site", "a", "--coordinator", "127.0.0.1:1"),
        *("--policy", "policy.toml", "--check"),
    ),
    "aggregator": ("rank.toml", "aggregator", "--config", "rank.toml", "--check"),
    "plan": ("plan.toml", "plan", "plan.toml"),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_bytes(text.encode())
    return tmp_path


def outcome(command: str) -> tuple[int, str, list[str]]:
    result = invoke(*COMMANDS[command][1:])
    return result.exit_code, result.stdout, told(result.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_byte_order_mark_and_the_lines_of_windows_change_nothing(command: str, folder: Path) -> None:
    path = folder / COMMANDS[command][0]
    windows = outcome(command)
    path.write_bytes(path.read_bytes().replace(b"\r\n", b"\n"))
    assert outcome(command) == windows
    path.write_bytes(codecs.BOM_UTF8 + path.read_bytes().replace(b"\n", b"\r\n"))
    assert outcome(command) == windows


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le"])
@pytest.mark.parametrize("command", COMMANDS)
def test_utf_16_is_refused_with_the_name_of_the_file(command: str, encoding: str, folder: Path) -> None:
    name = COMMANDS[command][0]
    (folder / name).write_bytes(FILES[name].encode(encoding))
    code, _, faults = outcome(command)
    assert code == 2
    (fault,) = faults
    assert fault.removeprefix("atoll: ").removeprefix(f"{folder}/") == f"{name}: is UTF-16; save it as UTF-8"


def test_a_join_code_is_read_without_its_byte_order_mark() -> None:
    def refused(content: bytes) -> str:
        return CliRunner().invoke(app, ["join", "-"], input=content).stderr

    plain = refused(b"NO-CODE\n")
    assert "atoll: " in plain
    assert refused(codecs.BOM_UTF8 + b"NO-CODE\r\n") == plain
    assert "standard input: is UTF-16; save it as UTF-8" in refused("NO-CODE\r\n".encode("utf-16"))


# ---------------------------------------------------------------- keys, certificates, requests


def _key(path: Path) -> object:
    return read_key(path.read_bytes()).public_key()


def _certificates(path: Path) -> object:
    return read_certificates(path.read_bytes())


def _publisher(path: Path) -> object:
    return publisher_key(path.parent).public_key()


@pytest.fixture
def pems(folder: Path) -> dict[Callable[[Path], object], bytes]:
    signing = Ed25519PrivateKey.generate()
    private = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    public = (serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return {
        _key: key_to_pem(new_key()),
        _certificates: Authority.create(folder / "authority", "Atoll").ca_pem,
        public_key: signing.public_key().public_bytes(*public),
        _publisher: signing.private_bytes(*private),
    }


@pytest.mark.parametrize("read", [_key, _certificates, public_key, _publisher])
def test_a_pem_file_is_read_as_windows_saves_it(
    read: Callable[[Path], object], pems: dict[Callable[[Path], object], bytes], folder: Path
) -> None:
    path, pem = folder / KEY, pems[read]
    path.touch(mode=0o600)
    path.write_bytes(pem)
    plain = read(path)
    path.write_bytes(codecs.BOM_UTF8 + pem.replace(b"\n", b"\r\n"))
    assert read(path) == plain
    path.write_bytes(pem.decode().encode("utf-16"))
    with pytest.raises((CertificateError, AuditUnusable, StoreCorrupted), match="is UTF-16; save it as UTF-8"):
        read(path)


@pytest.mark.parametrize("made", ["request", "answer"])
def test_a_request_or_an_answer_in_utf_16_is_named(made: str, folder: Path) -> None:
    assert invoke("authority", "init", folder / "ca").exit_code == 0
    (folder / made).write_bytes("-----BEGIN CERTIFICATE-----\r\n".encode("utf-16"))
    if made == "request":
        arguments = ["issue", folder / "ca", "main", "--role", "coordinator", "--request", made, "--out", "out"]
    else:
        arguments = ["install", folder / "member", made]
    result = invoke("authority", *arguments)
    assert result.exit_code == 2
    (fault,) = told(result.stderr)
    assert fault.startswith(f"atoll: {made}: is UTF-16; save it as UTF-8")


# ---------------------------------------------------------------- data


def _table(path: Path) -> object:
    return read_table(path, Columns(site="site", target="target")).dataset.tensors[0].tolist()


def _leaf(path: Path) -> object:
    return list(_users_of(path))


def _summed(path: Path) -> object:
    (path.parent / "data").write_bytes(b"data")
    path.replace(path.parent / "SHA256SUMS")
    return read_checked(path.parent / "data")


DATA = {
    _table: "site,target,x\r\nnorth,1,2.5\r\nnorth,0,1.5\r\n",
    _leaf: '{"users": [], "num_samples": [],\r\n "user_data": {}}\r\n',
    _summed: "3a6eb0790f39ac87c94f3856b2dd2c5d110e6811602261a9a923d3bb23adc8b7  data\r\n",
}


@pytest.mark.parametrize("read", DATA)
def test_data_files_are_read_as_windows_saves_them(read: Callable[[Path], object], folder: Path) -> None:
    path, text = folder / "file", DATA[read]
    path.write_bytes(text.replace("\r\n", "\n").encode())
    plain = read(path)
    path.write_bytes(codecs.BOM_UTF8 + text.encode())
    assert read(path) == plain
    path.write_bytes(text.encode("utf-16"))
    with pytest.raises(BadData, match="is UTF-16; save it as UTF-8"):
        read(path)
