"""The spool: an entry is whole and durable, or absent."""

import errno
import hashlib
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from atoll.client.disk import spool as spool_module
from atoll.client.disk.spool import Costs, Spool, SpoolFull
from atoll.client.disk.state_directory import StateDirectory
from atoll.protocol import log_fields
from atoll.protocol.log_fields import note_run
from atoll.protocol.manifest import UpdateManifest
from atoll.protocol.part_manifest import PartManifest
from atoll.protocol.settings import ConfigError
from atoll.protocol.wire.mesh_use import MeshUse
from atoll.tensors.layout import Piece
from atoll.tensors.pieces import part_name
from atoll.tensors.safetensors_file import write

USE = MeshUse(num_ranks=4, peak_bytes=10**9, steps_per_s=2.0, flops_per_s=3e12, peak_flops=1e13)
COSTS = Costs(download_seconds=0.5, train_seconds=2.0, mesh=USE)


def finished(tmp_path, *, run_id="run-1", round_id=3, size=1000, name="out.safetensors"):
    """Write a worker's file, and return it with the manifest of its pieces."""
    data = tmp_path / name
    pieces = write(data, {"w": np.arange(size, dtype=np.float32)})
    return data, UpdateManifest(run_id, round_id, "north", 2, "0" * 64, 10, 0.5, pieces)


def folder(tmp_path):
    path = tmp_path / "spool"
    path.mkdir(exist_ok=True)
    return path


def test_entry_comes_back_as_it_was_added(tmp_path):
    data, manifest = finished(tmp_path)
    spool = Spool(folder(tmp_path), 2**30)
    entry = spool.add(data, manifest, statistics={"loss": (1.5, 3.0)}, costs=COSTS)
    assert not data.exists()
    again = Spool(folder(tmp_path), 2**30)
    assert again.entries() == {("round", "run-1", 3): manifest.digest}
    assert again["round", "run-1", 3] == entry
    assert entry.manifest == manifest.encode()
    with entry.path.open("rb") as file:
        assert os.pread(file.fileno(), entry.num_bytes, entry.data_start) == np.arange(1000, dtype="<f4").tobytes()


def test_discarded_entry_is_gone_and_a_second_discard_does_nothing(tmp_path):
    data, manifest = finished(tmp_path)
    spool = Spool(folder(tmp_path), 2**30)
    spool.add(data, manifest, statistics={})
    spool.discard(("round", "run-1", 3))
    spool.discard(("round", "run-1", 3))
    assert spool.entries() == {}
    assert list(folder(tmp_path).iterdir()) == []


@pytest.mark.parametrize("where", ["0", "1", "size // 2", "size - 40", "size - 9", "size - 1"])
def test_entry_that_is_cut_anywhere_is_removed_with_a_warning(tmp_path, caplog, where):
    data, manifest = finished(tmp_path)
    spool = Spool(folder(tmp_path), 2**30)
    entry = spool.add(data, manifest, statistics={})
    size = entry.path.stat().st_size
    os.truncate(entry.path, eval(where, {"size": size}))
    assert Spool(folder(tmp_path), 2**30).entries() == {}
    assert not entry.path.exists()
    assert "is not a whole update" in caplog.text


def test_no_flipped_byte_changes_what_is_sent(tmp_path):
    """All but the bytes of the pieces, which the coordinator compares, is as it was written, or the entry is gone."""
    data, manifest = finished(tmp_path, size=4)
    entry = Spool(folder(tmp_path), 2**30).add(data, manifest, statistics={"loss": (1.5, 3.0)}, costs=COSTS)
    whole, removed = entry.path.read_bytes(), 0
    for place in range(len(whole)):
        entry.path.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << place % 8)]) + whole[place + 1 :])
        again = Spool(folder(tmp_path), 2**30)
        removed += not again.entries()
        assert not again.entries() or again["round", "run-1", 3] == entry
    assert removed == len(whole) - entry.data_start - entry.num_bytes


def test_an_entry_keeps_the_number_of_its_run_for_the_ids_of_its_traces(tmp_path):
    data, manifest = finished(tmp_path)
    assert Spool(folder(tmp_path), 2**30).add(data, manifest, statistics={}).run_number == 0  # none is known
    note_run("run-1", 2**62 + 1)
    data, manifest = finished(tmp_path)
    try:
        entry = Spool(folder(tmp_path), 2**30).add(data, manifest, statistics={})
    finally:
        del log_fields._numbers["run-1"]
    assert entry.run_number == Spool(folder(tmp_path), 2**30)["round", "run-1", 3].run_number == 2**62 + 1


def test_an_entry_of_an_earlier_program_is_sent(tmp_path):
    data, manifest = finished(tmp_path)
    entry = Spool(folder(tmp_path), 2**30).add(data, manifest, statistics={}, costs=COSTS)
    whole = entry.path.read_bytes()
    entry.path.write_bytes(whole[:-48] + whole[-16:-8] + b"atoll/1\n")
    assert Spool(folder(tmp_path), 2**30)["round", "run-1", 3] == entry


def test_files_that_are_no_entries_are_removed(tmp_path):
    (folder(tmp_path) / "run-1.3.update").write_bytes(b"x" * 100)
    (folder(tmp_path) / "other").write_bytes(b"")
    assert Spool(folder(tmp_path), 2**30).entries() == {}
    assert list(folder(tmp_path).iterdir()) == []


def test_entry_under_the_name_of_another_round_is_removed(tmp_path):
    data, manifest = finished(tmp_path)
    entry = Spool(folder(tmp_path), 2**30).add(data, manifest, statistics={})
    entry.path.rename(entry.path.with_name("run-1.4.update"))
    assert Spool(folder(tmp_path), 2**30).entries() == {}


@pytest.mark.parametrize("run_id", ["../../etc/passwd", "/", ".", "a" * 256, "Ünï", "a/b", "run.x"])
def test_run_id_from_the_wire_never_leads_out_of_the_folder(tmp_path, run_id):
    data, manifest = finished(tmp_path, run_id=run_id)
    entry = Spool(folder(tmp_path), 2**30).add(data, manifest, statistics={})
    assert entry.path.parent == folder(tmp_path)
    assert Spool(folder(tmp_path), 2**30).entries() == {("round", run_id, 3): manifest.digest}


def test_new_training_of_a_round_replaces_the_entry(tmp_path):
    spool = Spool(folder(tmp_path), 2**30)
    data, manifest = finished(tmp_path)
    spool.add(data, manifest, statistics={})
    data, _ = finished(tmp_path)
    other = replace(manifest, work=1.0)
    spool.add(data, other, statistics={})
    assert Spool(folder(tmp_path), 2**30).entries() == {("round", "run-1", 3): other.digest}


def test_update_beyond_the_bound_is_refused_and_leaves_nothing(tmp_path):
    spool = Spool(folder(tmp_path), 7000)
    data, manifest = finished(tmp_path)
    spool.add(data, manifest, statistics={})
    data, manifest = finished(tmp_path, round_id=4)
    with pytest.raises(SpoolFull, match="spool_max_bytes") as caught:
        spool.add(data, manifest, statistics={})
    assert caught.value.errno == errno.EDQUOT
    assert not data.exists()
    assert list(Spool(folder(tmp_path), 7000).entries()) == [("round", "run-1", 3)]


def test_full_disk_is_said_so_and_leaves_nothing(tmp_path, monkeypatch):
    data, manifest = finished(tmp_path)

    def full(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SpoolFull, match="cannot be stored"):
        Spool(folder(tmp_path), 2**30).add(data, manifest, statistics={})
    assert not data.exists()
    assert Spool(folder(tmp_path), 2**30).entries() == {}


def test_nobody_else_may_enter_a_new_directory_and_one_that_is_there_keeps_its_mode(tmp_path):
    before = os.umask(0o022)
    try:
        (tmp_path / "shared").mkdir()
        for name, mode in (("new", 0o700), ("shared", 0o755)):
            StateDirectory(tmp_path / name).close()
            assert (tmp_path / name).stat().st_mode & 0o777 == mode
    finally:
        os.umask(before)


def test_second_agent_is_refused_with_the_process_id_of_the_first(tmp_path):
    first = StateDirectory(tmp_path / "state")
    with pytest.raises(ConfigError, match=f"process {os.getpid()}"):
        StateDirectory(tmp_path / "state")
    first.close()
    StateDirectory(tmp_path / "state").close()


@pytest.mark.real
def test_lock_ends_with_its_process(tmp_path):
    code = "import sys; from pathlib import Path; from atoll.client.disk.state_directory import StateDirectory as S; "
    code += "s = S(Path(sys.argv[1])); print('ok', flush=True); sys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "s")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        assert process.stdout.readline() == b"ok\n"
        with pytest.raises(ConfigError, match=f"process {process.pid}"):
            StateDirectory(tmp_path / "s")
        process.kill()
    StateDirectory(tmp_path / "s").close()


def test_leftovers_of_a_killed_worker_are_cleared(tmp_path):
    state = StateDirectory(tmp_path / "state")
    (state.work / "update.safetensors.part").write_bytes(b"x")
    state.close()
    state = StateDirectory(tmp_path / "state")
    assert list(state.work.iterdir()) == []
    state.close()


def test_a_spool_on_a_volume_of_its_own_takes_updates(tmp_path, other_disk):
    """As where an operator mounts one at `spool`: no rename leads there."""
    data, manifest = finished(tmp_path)
    spool = Spool(other_disk, 2**30)
    entry = spool.add(data, manifest, statistics={"loss": (1.5, 3.0)})
    assert not data.exists()
    assert Spool(other_disk, 2**30)["round", "run-1", 3] == entry
    assert [path.name for path in other_disk.iterdir()] == [entry.path.name]


# ---------------------------------------------------------------- updates in parts


def divided(tmp_path, *, round_id=3, sizes=(1000, 0, 24)):
    """Write the folder of a runner, and return it with the root and the manifests of its parts."""
    data = tmp_path / "out"
    data.mkdir()
    parts = []
    for index, size in enumerate(sizes):
        raw = np.arange(index, index + size, dtype=np.float32).tobytes()
        (data / part_name(index)).write_bytes(raw)
        box = Piece("w", "F32", (10_000 * index,), (size,), hashlib.sha256(raw).hexdigest())
        parts.append(PartManifest(index, (box,) if size else ()))
    listed = tuple(part.listed for part in parts)
    return data, UpdateManifest("run-1", round_id, "north", 2, "0" * 64, 10, 0.5, (), parts=listed), parts


def test_entry_of_parts_comes_back_as_it_was_added(tmp_path):
    data, root, parts = divided(tmp_path)
    spool = Spool(folder(tmp_path), 2**30)
    entry = spool.add(data, root, statistics={"loss": (1.5, 3.0)}, costs=COSTS, rank=3, spreads=True, parts=parts)
    assert entry.spreads
    assert not data.exists()
    again = Spool(folder(tmp_path), 2**30)
    assert again.entries() == {("round", "run-1", 3): root.digest}
    assert again["round", "run-1", 3] == entry
    assert [part.num_bytes for part in entry.parts] == [4000, 0, 96]
    assert entry.num_bytes == 4096
    for part, manifest in zip(entry.parts, parts, strict=True):
        assert part.manifest == manifest.encode()
        assert part.path.stat().st_size == part.num_bytes
    again.discard(("round", "run-1", 3))
    assert list(folder(tmp_path).iterdir()) == []


@pytest.mark.parametrize(
    "spoil",
    [
        lambda entry: (entry / "root.json").unlink(),
        lambda entry: (entry / "root.json").write_bytes(b"{}"),
        lambda entry: (entry / "root.json").write_bytes(b""),
        lambda entry: (entry / "part.0001").unlink(),
        lambda entry: (entry / "part.0002.json").unlink(),
        lambda entry: os.truncate(entry / "part.0002", 95),
        lambda entry: (entry / "part.0002.json").write_bytes((entry / "part.0000.json").read_bytes()),
        lambda entry: entry.rename(entry.with_name("run-1.4.parts")),
    ],
)
def test_an_entry_that_lacks_a_part_or_the_root_is_removed_with_a_warning(tmp_path, caplog, spoil):
    data, root, parts = divided(tmp_path)
    spoil(Spool(folder(tmp_path), 2**30).add(data, root, statistics={}, parts=parts).path)
    assert Spool(folder(tmp_path), 2**30).entries() == {}
    assert list(folder(tmp_path).iterdir()) == []
    assert "is not a whole update" in caplog.text


def test_parts_for_which_there_is_no_room_leave_nothing(tmp_path, monkeypatch):
    data, root, parts = divided(tmp_path)
    with pytest.raises(SpoolFull, match="4096 bytes does not fit"):
        Spool(folder(tmp_path), 4095).add(data, root, statistics={}, parts=parts)
    assert not data.exists()
    data, root, parts = divided(tmp_path)
    spool, moves = Spool(folder(tmp_path), 2**30), []

    def full(source, target):
        moves.append(target)
        if len(moves) == 2:
            raise OSError(errno.ENOSPC, "no room")
        os.replace(source, target)

    monkeypatch.setattr(spool_module, "move_into", full)
    with pytest.raises(SpoolFull, match="cannot be stored"):
        spool.add(data, root, statistics={}, parts=parts)
    assert spool.entries() == {}
    assert list(folder(tmp_path).iterdir()) == []
    assert not data.exists()


def test_an_agent_starts_beside_what_a_runner_has_left_in_a_folder(tmp_path):
    (tmp_path / "work" / "update.safetensors").mkdir(parents=True)
    (tmp_path / "work" / "update.safetensors" / "part.0000").touch()
    StateDirectory(tmp_path).close()
    assert list((tmp_path / "work").iterdir()) == []
