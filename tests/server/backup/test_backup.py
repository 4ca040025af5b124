"""The content of a backup, its table of contents, and the files of the user that it never touches."""

import errno
import io
import json
import os
import tarfile
import time

import pytest

from atoll.protocol.identity.certificates import Issuer
from atoll.protocol.identity.credential import Credential
from atoll.protocol.identity.names import COORDINATOR
from atoll.protocol.signals import ExitCode
from atoll.server.backup import backup
from atoll.server.backup.backup import back_up
from atoll.server.backup.contents import BackupFailed, belongs, is_immutable, is_key, parse_contents
from atoll.server.backup.restore import restore
from atoll.server.identity.authority import Authority
from atoll.server.journal.state_directory import StateDirectory
from tests.cli.invoking import invoke, refused, shown

CA = Authority(Issuer.create("one", now=time.time()))
SUM = "0" * 64
VERSION, UPDATE = "runs/r-1/versions/000012.safetensors", f"runs/r-1/updates/{SUM}.bin"
KEYS = (
    "identity/authority/key.pem",
    "identity/publisher.pem",
    "audit/key.pem",
    "noise.key",
    "aggregators/0of2/identity/x/ca.pem",
)
STRANGERS = (
    *("b.tar", "backup.json", "bk/identity/key.pem", "runs/b.tar", "runs/r-1/b.tar", "audit/b.tar", "audit/x/key.pem"),
    *("runs/r-1/versions/README.md", "runs/r-1/versions/x/000000.safetensors", "runs/r-1/updates/b.tar", "b/state.db"),
    *(f"runs/r-1/updates/{SUM}.json", f"runs/r-1/updates/{SUM}.3.bin", f"runs/r-1/incoming/{SUM}.0003.json"),
    *("aggregators/b.tar", "aggregators/0of2/b.tar", "aggregators/0of2/state.db", "runs/bk/identity/key.pem", "../a"),
)


@pytest.fixture
def state(tmp_path):
    """A state directory with a key, and no run."""
    StateDirectory.open(tmp_path / "state").close()
    (tmp_path / "state" / "identity" / "authority").mkdir(parents=True)
    (tmp_path / "state" / "identity" / "authority" / "key.pem").write_text("SECRET")
    return tmp_path / "state"


def everything(folder):
    return {str(path.relative_to(folder)): path.is_file() and path.read_bytes() for path in sorted(folder.rglob("*"))}


# ---------------------------------------------------------------- the files of a state directory


def test_what_a_state_directory_holds_is_known_and_nothing_else_is_in_a_backup():
    known = (
        *(
            "state.db",
            "alive",
            "restored.json",
            "audit/audit-000000000000.jsonl",
            "audit/public.pem",
            "audit/cut-7.bin",
        ),
        *("runs/r-1/ranks", "runs/r-1/worker.log", "runs/r-1/versions/000012.momentum.manifest.json"),
        *(f"runs/r-1/updates/{SUM}.0003.bin", f"runs/r-1/updates/{SUM}.0003.json"),
        *("aggregators/0of2/rank.json", "aggregators/0of2/address", f"aggregators/1of2/{VERSION}"),
    )
    assert all(map(belongs, (*known, VERSION, UPDATE, *KEYS)))
    assert [path for path in STRANGERS if belongs(path)] == []
    assert all(map(is_immutable, (VERSION, UPDATE, f"aggregators/1of2/{UPDATE}")))
    assert not any(map(is_immutable, (*known[:8], *KEYS)))
    assert all(map(is_key, KEYS))
    assert not any(map(is_key, (*known, VERSION)))


@pytest.mark.parametrize("out", ["state/b.tar", "state/b", "link/b.tar", "state/identity/b.tar"])
def test_a_backup_does_not_lie_in_the_directory_that_it_is_of(state, out):
    (state.parent / "link").symlink_to(state)
    before = everything(state)
    (fault,) = refused("backup", state, state.parent / out)
    assert fault == f"{state.parent / out} is inside of {state}, a state directory: name a place outside of it"
    assert everything(state) == before


@pytest.mark.parametrize("place", ["state/new", "link/new", "state/identity/new", "state/empty"])
def test_a_restored_directory_does_not_lie_in_a_state_directory(state, place):
    """Its first backup left it out, with all that was restored."""
    back_up(state, state.parent / "b.tar")
    (state.parent / "link").symlink_to(state)
    (state / "empty").mkdir()
    before = everything(state)
    (fault,) = refused("restore", state.parent / "b.tar", state.parent / place)
    assert fault == f"{state.parent / place} is inside of {state}, a state directory: name a place outside of it"
    assert everything(state) == before


def test_a_file_of_another_program_above_a_place_makes_no_state_directory(state):
    """Only its own files do: `database.json` is a usual name."""
    (state.parent / "database.json").write_text('{"host": "h"}')
    back_up(state, state.parent / "b.tar")
    restore(state.parent / "b.tar", state.parent / "new")
    assert everything(state.parent / "new")


def test_what_says_how_things_are_at_this_moment_is_neither_in_a_backup_nor_left_out(state):
    before = shown("backup", state, state.parent / "before.tar")["left_out"]
    for name in ("conflicts.json", "presence.json", "folder_id", "coordinator.json", "lock"):
        (state / name).touch()
    assert shown("backup", state, state.parent / "after.tar")["left_out"] == before
    restore(state.parent / "after.tar", state.parent / "new")
    assert not {"conflicts.json", "presence.json", "folder_id", "coordinator.json"} & set(
        everything(state.parent / "new")
    )


@pytest.mark.parametrize("out", ["out.tar", "out"])
def test_a_backup_that_was_put_into_the_directory_is_in_none_and_so_no_key_is_either(state, out):
    back_up(state, state.parent / "whole.tar")
    back_up(state, state.parent / "whole")
    os.rename(state.parent / "whole.tar", state / "b.tar")
    os.rename(state.parent / "whole", state / "runs" / "bk")
    (state / "elsewhere").symlink_to(state.parent)
    said = shown("backup", state, state.parent / out, "--without-keys")
    assert {"b.tar", "elsewhere", "runs/bk/backup.json", "runs/bk/identity/authority/key.pem"} <= set(said["left_out"])
    (state.parent / "left").mkdir()
    restore(state.parent / out, state.parent / "new")
    assert set(everything(state.parent / "new")) == {"alive", "restored.json", "runs", "state.db"}
    files = [path for path in (state.parent / out).rglob("*") if path.is_file()] or [state.parent / out]
    assert not any(b"SECRET" in path.read_bytes() for path in files)
    (state / "a\x1b\udcff").touch()
    note = invoke("backup", state, state.parent / "more").stderr
    assert note.isascii()
    assert "\x1b" not in note
    assert "left out, because they are not the coordinator's: a" in note
    assert ", b.tar, elsewhere, runs/bk/" in note


# ---------------------------------------------------------------- a credential that is replaced meanwhile


def credential():
    return CA.credential(COORDINATOR)


def test_a_certificate_that_is_renewed_while_it_is_copied_fits_to_its_key(state, monkeypatch):
    mine, copy, copied = state / "identity" / "coordinator", backup._copy_whole_lines, []
    credential().store(mine)

    def copy_while_it_is_renewed(path, to):
        copy(path, to)
        if path == mine / "certificate.pem" and len(copied) < 2:
            credential().store(mine)
            copied.append(path)

    monkeypatch.setattr(backup, "_copy_whole_lines", copy_while_it_is_renewed)
    back_up(state, state.parent / "out")
    assert len(copied) == 2
    restore(state.parent / "out", state.parent / "new")
    assert Credential.load(state.parent / "new" / "identity" / "coordinator") == Credential.load(mine)


def test_a_credential_whose_renewing_was_cut_is_whole_in_a_backup(state, monkeypatch):
    mine, renames = state / "identity" / "coordinator", os.replace
    credential().store(mine)

    def cut(source, target):
        if source == mine / "certificate.pem.new":
            raise InterruptedError
        renames(source, target)

    monkeypatch.setattr(os, "replace", cut)
    with pytest.raises(InterruptedError):
        credential().store(mine)
    monkeypatch.undo()
    assert (mine / "certificate.pem.new").exists()
    for name, keys in (("out.tar", True), ("public.tar", False)):
        back_up(state, state.parent / name, keys=keys)
        restore(state.parent / name, state.parent / f"from-{name}")
    assert Credential.load(state.parent / "from-out.tar" / "identity" / "coordinator") == Credential.load(mine)
    assert not (state.parent / "from-public.tar" / "identity").exists()


@pytest.mark.slow
def test_a_certificate_that_changes_without_end_is_said(state, monkeypatch):
    credential().store(mine := state / "identity" / "coordinator")
    needs_of = backup.needs_of
    monkeypatch.setattr(backup, "needs_of", lambda staging: (credential().store(mine), needs_of(staging))[1])
    with pytest.raises(BackupFailed, match=r"renewed faster than they can be copied: .*\.pem changed 20 times"):
        back_up(state, state.parent / "out")


# ---------------------------------------------------------------- files of the user


@pytest.mark.parametrize("out", ["bk", "bk.tar"])
@pytest.mark.parametrize("is_folder", [True, False])
def test_what_lies_where_a_half_backup_would_is_never_touched(state, out, is_folder):
    back_up(state, state.parent / "source.tar")
    part = state.parent / f"{out}.part"
    precious = part / "file" if is_folder else part
    precious.parent.mkdir(exist_ok=True)
    precious.write_text("precious")
    for command in (
        ["backup", state, state.parent / out],
        ["restore", state.parent / "source.tar", part.with_suffix("")],
    ):
        (fault,) = refused(*command)
        assert fault.startswith(f"{part} exists (left by a killed or still running backup or restore, or one")
        assert precious.read_text() == "precious"
        assert not (state.parent / out).exists()


@pytest.mark.parametrize("out", ["bk", "bk.tar"])
def test_of_two_backups_to_one_place_one_is_made_and_the_other_refused(state, out, monkeypatch):
    other, stage = state.parent / "other", backup._stage
    StateDirectory.open(other).close()

    def meanwhile(*arguments, **options):
        for one, why in ((other, r"\.part exists"), (state, "another backup of .* is under way")):
            with pytest.raises(BackupFailed, match=why):
                back_up(one, state.parent / out)
        return stage(*arguments, **options)

    monkeypatch.setattr(backup, "_stage", meanwhile)
    back_up(state, state.parent / out)
    restore(state.parent / out, state.parent / "new")
    assert (state.parent / "new" / "identity").is_dir()


def test_a_backup_that_came_about_meanwhile_is_not_replaced(state, monkeypatch):
    out, beside = state.parent / "b.tar", backup.beside

    def late(target, *, is_file):
        target.write_text("of another one")
        return beside(target, is_file=is_file)

    monkeypatch.setattr(backup, "beside", late)
    with pytest.raises(BackupFailed, match="exists: name a new"):
        back_up(state, out)
    assert out.read_text() == "of another one"
    assert not out.with_name("b.tar.part").exists()


@pytest.mark.parametrize("out", ["bk", "bk.tar"])
def test_what_fails_leaves_nothing_behind(state, out, monkeypatch):
    back_up(state, state.parent / "source")
    before = everything(state.parent)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        for command in (
            ["backup", state, state.parent / out],
            ["restore", state.parent / "source", state.parent / "new"],
        ):
            ended = invoke(*command)
            assert ended.exit_code == ExitCode.AWAY
            assert f"{command[-1]} has no room: " in ended.stderr
    assert everything(state.parent) == before
    for command in (
        ["backup", state, state.parent / "no" / out],
        ["restore", state.parent / "source", state.parent / "no/x"],
    ):
        assert refused(*command)[0].endswith(f"cannot be created: there is no folder {state.parent / 'no'}")
    assert everything(state.parent) == before


@pytest.mark.parametrize("out", ["bk", "bk.tar"])
def test_a_journal_that_cannot_be_copied_is_said_in_a_line_and_leaves_nothing_behind(state, out):
    rows = (state / "state.db").read_bytes()
    for damaged in (b"no database" * 1000, rows[:4096] + b"\xff" * 4096 + rows[8192:-4096]):
        (state / "state.db").write_bytes(damaged)
        before = everything(state.parent)
        (said,) = refused("backup", state, state.parent / out)
        assert said.startswith(f"{state / 'state.db'} cannot be copied to ")
        after = everything(state.parent)
        assert set(after) - set(before) <= {"state/backup.lock", "state/state.db-shm", "state/state.db-wal"}
        assert after.items() >= before.items()


# ---------------------------------------------------------------- the place of a backup


def test_a_link_to_nowhere_and_the_root_are_no_places_for_a_backup(state, tmp_path):
    (tmp_path / "link").symlink_to("nowhere")
    for out in (tmp_path / "link", "/", "."):
        assert refused("backup", state, out) == [f"{out} exists: name a new folder or .tar file"]


def test_a_state_directory_is_not_made_where_one_stands_but_through_a_link(state, tmp_path, monkeypatch):
    back_up(state, tmp_path / "b.tar")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert refused("restore", tmp_path / "b.tar", ".") == [
        ". is the current directory, which the new one would replace: name it from its parent"
    ]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("empty")
    shown("restore", "b.tar", "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "empty" / "identity" / "authority" / "key.pem").read_text() == "SECRET"


# ---------------------------------------------------------------- damage


@pytest.mark.parametrize("num_bytes", [0, 1, 511, 512, 1000, 40_000, -20_000, -10_240])
def test_a_tar_file_that_was_cut_short_is_refused(state, tmp_path, num_bytes):
    back_up(state, tmp_path / "b.tar")
    whole = (tmp_path / "b.tar").read_bytes()
    (tmp_path / "cut.tar").write_bytes(whole[:num_bytes])
    (fault,) = refused("restore", tmp_path / "cut.tar", tmp_path / "new")
    assert fault.startswith(f"{tmp_path / 'cut.tar'} is not a ")
    assert not (tmp_path / "new.part").exists()


@pytest.mark.parametrize(
    "size", [b"\x80" + b"\xff" * 11, b"\x80\0\0\0" + b"\x7f" + b"\xff" * 7, b"\xff" * 12, b"77777777777\0"]
)
def test_a_tar_file_that_names_sizes_that_no_file_has_is_refused(state, tmp_path, size):
    back_up(state, tmp_path / "b.tar")
    data = bytearray((tmp_path / "b.tar").read_bytes())
    for head in [at for at in range(0, len(data), 512) if data[at + 257 : at + 262] == b"ustar"]:
        block = bytearray(data)
        block[head + 124 : head + 136], block[head + 148 : head + 156] = size, b" " * 8
        block[head + 148 : head + 156] = b"%06o\0 " % sum(block[head : head + 512])
        (tmp_path / "bad.tar").write_bytes(block)
        assert refused("restore", tmp_path / "bad.tar", tmp_path / "new")[0].startswith(
            f"{tmp_path / 'bad.tar'} is not a "
        )
    assert not (tmp_path / "new.part").exists()


def test_a_member_of_a_tar_file_that_is_no_file_is_refused(state, tmp_path):
    back_up(state, tmp_path / "b")
    with tarfile.open(tmp_path / "b.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("state.db"), io.BytesIO())
        tar.getmembers()[0].type = tarfile.DIRTYPE
        link = tarfile.TarInfo("alive")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
        tar.add(tmp_path / "b" / "backup.json", "backup.json")
    (fault,) = refused("restore", tmp_path / "b.tar", tmp_path / "new")
    assert fault.endswith("alive is not a regular file")


def test_a_backup_with_a_wrong_size_or_without_a_journal_is_refused(state, tmp_path):
    back_up(state, tmp_path / "b")
    contents = tmp_path / "b" / "backup.json"
    said = json.loads(contents.read_text())
    said["files"][0]["num_bytes"] += 1
    contents.write_text(json.dumps(said))
    (fault,) = refused("restore", tmp_path / "b", tmp_path / "new")
    assert fault.endswith("alive is damaged: its size and SHA-256 differ from those in backup.json")
    contents.write_text(json.dumps(said | {"files": []}))
    assert refused("restore", tmp_path / "b", tmp_path / "new")[0].endswith("it has no state.db")


PART = {"path": "state.db", "num_bytes": 3, "mode": 0o600, "sha256": SUM}
SAID = {"format": 1, "atoll": "0.1", "made_at": 1.5, "has_keys": True, "files": [PART]}


def test_what_a_backup_says_of_itself_is_read():
    contents = parse_contents(json.dumps(SAID).encode())
    assert (contents.made_at, contents.has_keys, contents.num_bytes) == (1.5, True, 3)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"format": 2}, "has format 2, this Atoll knows 1"),
        ({"format": "1"}, "format: Input should be a valid integer"),
        ({"made_at": None}, "made_at: "),
        ({"made_at": -1}, "made_at: "),
        ({"made_at": 1e300}, "made_at: "),
        ({"has_keys": 1}, "has_keys: "),
        ({"more": 1}, "more: "),
        ({"files": None}, "files: "),
        ({"files": [PART, PART]}, "files: a path is there twice"),
        ({"files": [PART, PART | {"path": "state.db/x"}]}, "files: a path is there twice"),
        ({"files": [PART | {"path": 5}]}, "files.0.path: Input should be a valid string"),
        ({"files": [PART | {"path": "a\0b"}]}, "files.0.path: lies outside, or is not a path"),
        ({"files": [PART | {"path": "../a"}]}, "lies outside"),
        ({"files": [PART | {"path": "/etc/x"}]}, "lies outside"),
        ({"files": [PART | {"path": "a//b"}]}, "lies outside"),
        ({"files": [PART | {"path": "a/./b"}]}, "lies outside"),
        ({"files": [PART | {"path": ""}]}, "lies outside"),
        ({"files": [PART | {"num_bytes": -1}]}, "files.0.num_bytes: "),
        ({"files": [PART | {"num_bytes": 1.0}]}, "files.0.num_bytes: "),
        ({"files": [PART | {"num_bytes": 10**400}]}, "files.0.num_bytes: "),
        ({"files": [PART | {"mode": 10**30}]}, "files.0.mode: "),
        ({"files": [PART | {"sha256": SUM + "\n"}]}, "files.0.sha256: "),
        ({"files": [PART | {"sha256": "A" * 64}]}, "files.0.sha256: "),
    ],
)
def test_what_a_backup_says_of_itself_wrongly_is_refused(change, fault):
    with pytest.raises(BackupFailed) as caught:
        parse_contents(json.dumps(SAID | change).encode())
    assert fault in str(caught.value)


@pytest.mark.parametrize("name", sorted(SAID))
def test_nothing_that_a_backup_says_of_itself_may_be_missing(name):
    with pytest.raises(BackupFailed, match=f"{name}: Field required"):
        parse_contents(json.dumps({key: value for key, value in SAID.items() if key != name}).encode())


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff", b"[" * 10_000, json.dumps(SAID).encode()[:-1]])
def test_what_is_no_json_object_is_refused(data):
    with pytest.raises(BackupFailed, match=r"backup\.json is damaged: "):
        parse_contents(data)


def test_a_volume_that_is_mounted_in_a_state_directory_is_copied_where_no_link_leads(state, tmp_path, monkeypatch):
    def another_disk(source, target):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), source)

    monkeypatch.setattr(os, "link", another_disk)
    (tmp_path / "staging").mkdir()
    kept = state / "runs" / "r-1" / "versions" / "000000.safetensors"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"weights")
    for _ in range(2):  # as before and after the copy of the journal
        backup._link(state, tmp_path / "staging")
    copied = {path: content for path, content in everything(tmp_path / "staging").items() if content}
    assert copied == {"runs/r-1/versions/000000.safetensors": b"weights"}


# ---------------------------------------------------------------- links in a state directory

LINKED = ("runs", "runs/r-1", "runs/r-1/versions", "runs/r-1/updates", "runs/r-1/contents", "audit", "statistics")
LINKED += ("identity", "identity/authority", "aggregators", "aggregators/0of2", "aggregators/0of2/runs")


@pytest.mark.parametrize("is_mounted", [True, False])
@pytest.mark.parametrize("folder", LINKED)
def test_a_link_in_the_place_of_a_folder_of_the_coordinator_is_refused(state, tmp_path, folder, is_mounted):
    """Without its audit log, or its authority, a backup was made with success."""
    (state / folder).mkdir(parents=True, exist_ok=True)
    (state / folder).rename(tmp_path / "away")
    (state / folder).symlink_to(tmp_path / ("away" if is_mounted else "nowhere"))
    with pytest.raises(BackupFailed, match=rf"(?s){folder} is a link, which a backup does not follow\n.*mount --bind"):
        back_up(state, tmp_path / "b.tar")
    assert not list(tmp_path.glob("b.tar*"))


def test_a_link_to_a_file_of_the_coordinator_is_refused_and_a_strangers_is_left_out(state, tmp_path):
    (state / "b.tar").symlink_to("/")
    (state / "runs" / "b.tar").symlink_to(state / "state.db")
    assert back_up(state, tmp_path / "a.tar").strangers == ("b.tar", "runs/b.tar")
    (state / "noise.key").write_text("SECRET")
    (state / "noise.key").rename(tmp_path / "noise.key")
    (state / "noise.key").symlink_to(tmp_path / "noise.key")
    with pytest.raises(BackupFailed, match=r"noise\.key is a link"):
        back_up(state, tmp_path / "b.tar")
    back_up(state, tmp_path / "b.tar", keys=False)


def test_a_journal_behind_a_link_is_backed_up(state, tmp_path):
    (state / "state.db").rename(tmp_path / "state.db")
    (state / "state.db").symlink_to(tmp_path / "state.db")
    back_up(state, tmp_path / "b.tar")
    restore(tmp_path / "b.tar", tmp_path / "restored")
    assert (tmp_path / "restored" / "state.db").read_bytes()
