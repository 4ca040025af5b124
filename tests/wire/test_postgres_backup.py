"""The backup of a coordinator whose journal is in a real PostgreSQL server, while its rounds go on."""

import asyncio
import json

import pytest

from atoll.protocol.threads import on_thread
from atoll.server.backup.backup import back_up
from atoll.server.backup.contents import BackupFailed
from atoll.server.backup.restore import restore, verify
from atoll.server.required.losses import losses_in
from atoll.server.required.needs import needs_of
from atoll.server.views.history import History
from tests.cli.invoking import invoke, refused, said
from tests.wire.live_coordinator import running
from tests.wire.test_round import committed, live, report

pytest.importorskip("psycopg", reason="the driver is not installed: pip install -c constraints.txt -e '.[dev]'")

ROUNDS = 12


@pytest.fixture(autouse=True)
def large(monkeypatch):
    """Give each update a file of its own, as one of more than 16 KiB has."""
    monkeypatch.setattr("atoll.server.files.incoming.SMALL_BYTES", 0)


async def reporting(client):
    while True:
        await report(client)


@live
async def test_a_backup_under_load_is_of_one_instant_and_goes_on_in_another_schema_or_in_a_file(
    tmp_path, postgres_server, schema_url
):
    state, backups = tmp_path / "state", [tmp_path / "one.tar", tmp_path / "two"]
    async with (
        running(state, coordinator__database=schema_url, coordinator__keep_versions=1, rounds=200) as it,
        it.client("a") as a,
        it.client("b") as b,
    ):
        work = [asyncio.ensure_future(reporting(client)) for client in (a, b)]
        await committed(it, 3)
        for out in backups:
            before = it.run.machine.ledger.version
            made = await on_thread(None, lambda out=out: back_up(state, out))
            await committed(it, before + 2)  # its rounds went on
            assert made.database
            assert made.strangers == ()
            assert (await on_thread(None, lambda out=out: verify(out))).needs == made.needs
        for task in work:
            task.cancel()
    new = postgres_server.url(postgres_server.new_schema())
    moved, plain = tmp_path / "moved", tmp_path / "plain"
    restore(backups[0], moved, database=new)
    restore(backups[1], plain)
    assert not (moved / "state.db").exists()
    assert "PostgreSQL" not in said("run", "list", "--state", plain)
    for restored in (moved, plain):
        assert losses_in(restored) == []
        [need] = needs_of(restored)
        async with running(restored) as it, it.client("a") as a, it.client("b") as b:
            await asyncio.gather(report(a), report(b))
            await committed(it, need.version + 1)
        assert "sound: " in said("audit", "verify", "--state", restored)
    assert [record.phase for record in History(moved).rounds("tiny-1")].count("committed") > 3


@live
async def once(state, url, rounds=2):
    async with running(state, coordinator__database=url, rounds=rounds) as it, it.client("a") as a, it.client("b") as b:
        await asyncio.gather(report(a), report(b))
        await committed(it, 1)


def test_journal_and_files_are_checked_as_a_pair_and_a_used_schema_is_refused(tmp_path, postgres_server, schema_url):
    state, out = tmp_path / "state", tmp_path / "out"
    once(state, schema_url)
    back_up(state, out)
    with pytest.raises(BackupFailed, match="has tables: name a database or a schema without any"):
        restore(out, tmp_path / "new", database=schema_url)
    assert not (tmp_path / "new").exists()
    assert not (tmp_path / "new.part").exists()
    other = postgres_server.url(postgres_server.new_schema())
    once(tmp_path / "other", other)
    (fault,) = refused("backup", state, tmp_path / "wrong", "--database", other)
    assert fault.endswith(f"is not the database of {state}: name the right one with --database")
    made = invoke("restore", out, tmp_path / "as-file")
    assert "its journal" not in made.stderr
    assert "--database puts it into a server" in made.stderr
    contents = json.loads((out / "backup.json").read_text())
    [version] = out.glob("runs/*/versions/000001.safetensors")
    version.unlink()
    contents["files"] = [part for part in contents["files"] if not part["path"].endswith(version.name)]
    (out / "backup.json").write_text(json.dumps(contents))
    (fault,) = refused("backup", "verify", out)
    assert "000001.safetensors is missing: it is the global model" in fault
    [gone] = state.glob("runs/*/versions/000001.safetensors")
    gone.unlink()
    fault, *_ = refused("backup", state, tmp_path / "third")
    assert fault.startswith(f"run tiny-1: {gone} is missing: it is the global model")


def test_a_journal_of_a_file_moves_into_a_server(tmp_path, postgres_server, schema_url):
    @live
    async def first(state):
        async with running(state, rounds=3) as it, it.client("a") as a, it.client("b") as b:
            await asyncio.gather(report(a), report(b))
            await committed(it, 1)

    first(tmp_path / "state")
    back_up(tmp_path / "state", tmp_path / "out.tar")
    said("restore", tmp_path / "out.tar", tmp_path / "moved", "--database", schema_url)

    @live
    async def then(state):
        async with running(state) as it, it.client("a") as a, it.client("b") as b:
            assert it.run.machine.ledger.version == 1
            await asyncio.gather(report(a), report(b))
            await committed(it, 2)

    then(tmp_path / "moved")
    assert [record.phase for record in History(tmp_path / "moved").rounds("tiny-1")][:2] == ["committed"] * 2
