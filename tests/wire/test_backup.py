"""Backups of a coordinator that runs in this process: what is refused, and what is done again."""

import shutil

import pytest

from atoll.server.backup import backup
from atoll.server.backup.backup import back_up
from atoll.server.backup.contents import BackupFailed
from atoll.server.backup.restore import restore
from tests.cli.invoking import invoke, refused, said
from tests.wire.live_coordinator import running
from tests.wire.test_round import live


@live
async def test_a_backup_that_is_damaged_or_would_overwrite_something_is_refused(tmp_path):
    state, out = tmp_path / "state", tmp_path / "backup"
    async with running(state):
        (state / "identity").mkdir(exist_ok=True)
        (state / "identity" / "key.pem").write_text("secret")
        back_up(state, out, keys=False)
        assert not list(out.rglob("key.pem"))
        back_up(state, tmp_path / "backup.tar")
        with pytest.raises(BackupFailed, match="exists"):
            back_up(state, out)
        with pytest.raises(BackupFailed, match="is not empty"):
            restore(out, state)
    restore(tmp_path / "backup.tar", tmp_path / "whole")
    assert (tmp_path / "whole").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "whole" / "identity" / "key.pem").read_text() == "secret"
    assert not (state / backup.STAGING).exists()
    [version] = out.glob("runs/*/versions/*.safetensors")
    version.write_bytes(version.read_bytes()[:-1] + b"x")
    with pytest.raises(BackupFailed, match=r"000000\.safetensors is damaged"):
        restore(out, tmp_path / "new")
    (out / "backup.json").unlink()
    with pytest.raises(BackupFailed, match="not a complete backup"):
        restore(out, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@live
async def test_a_backup_names_no_file_outside_of_the_new_directory(tmp_path):
    state, out = tmp_path / "state", tmp_path / "backup"
    async with running(state):
        back_up(state, out)
    contents = out / "backup.json"
    contents.write_text(contents.read_text().replace('"state.db"', '"../state.db"'))
    with pytest.raises(BackupFailed, match="lies outside"):
        restore(out, tmp_path / "new")


@live
async def test_a_file_of_somebody_among_those_of_a_run_is_left_out_and_named(tmp_path):
    state, out = tmp_path / "state", tmp_path / "backup"
    async with running(state):
        assert back_up(state, tmp_path / "plain").strangers == ()
        for name in ("versions/README.md", "versions/000000.manifest.json~", "updates/note.txt"):
            (state / "runs" / "tiny-1" / name).touch()
        found = back_up(state, out).strangers
    assert [path.rpartition("/")[2] for path in found] == ["note.txt", "000000.manifest.json~", "README.md"]
    assert not [path for path in out.rglob("*") if path.name in ("README.md", "note.txt")]
    restore(out, tmp_path / "new")


@live
async def test_a_file_that_came_and_went_between_the_two_looks_makes_it_look_again(tmp_path, monkeypatch):
    state, looks = tmp_path / "state", []
    link = backup._link

    def unlucky(state, staging):
        link(state, staging)
        looks.append(staging)
        if len(looks) == 2:
            [version] = staging.glob("runs/*/versions/000000.safetensors")
            version.unlink()

    monkeypatch.setattr(backup, "_link", unlucky)
    async with running(state):
        back_up(state, tmp_path / "backup")
    assert len(looks) == 4
    restore(tmp_path / "backup", tmp_path / "new")


@pytest.mark.parametrize("has_identity", [True, False])
@pytest.mark.parametrize("has_audit_key", [True, False])
def test_what_is_said_of_a_backup_without_keys_is_all_that_the_coordinator_needs(tmp_path, has_identity, has_audit_key):
    state, restored, old = tmp_path / "state", tmp_path / "restored", tmp_path / "old"
    start_once(state)
    back_up(state, tmp_path / "backup", keys=False)
    *_, identity, audit = invoke("restore", tmp_path / "backup", restored).stderr.splitlines()
    assert identity == "the backup has no keys: put identity/ in place, or every client must enrol again"
    assert audit.startswith(f"also put audit/key.pem in place, or move {restored}/audit away to begin a new log")
    if has_identity:
        shutil.copytree(state / "identity", restored / "identity")
    assert "audit/key.pem is missing" in refused("coordinator", "--state", restored)[0]
    if has_audit_key:
        shutil.copy(state / "audit" / "key.pem", restored / "audit" / "key.pem")
    else:
        (restored / "audit").rename(old)
        assert "sound: " in said("audit", "verify", *old.glob("audit-*.jsonl"), "--key", old / "public.pem")
    start_once(restored)
    assert "sound: " in said("audit", "verify", "--state", restored)


@live
async def start_once(state):
    async with running(state, coordinator__insecure=False):
        pass
