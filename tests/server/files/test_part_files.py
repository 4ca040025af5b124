"""The parts of an update on disk: kept, made whole, folded, and collected together."""

import hashlib
import os
from dataclasses import replace

import numpy as np
import pytest

from atoll.protocol.manifest import UpdateManifest
from atoll.protocol.part_manifest import PartManifest
from atoll.server.errors import StoreCorrupted
from atoll.server.files.run_store import RunStore
from atoll.server.journal.codec import StoredUpdateMeta, decode_meta
from atoll.tensors.layout import Piece, Tensor
from atoll.tensors.updates.reader import UpdateReader
from tests.server.files.test_run_store import Crash, crash_at

VALUES = np.array([[1.0, -2.0], [0.5, 3.0], [0.0, -4.0]], np.float32)


@pytest.fixture
def store(tmp_path):
    return RunStore(tmp_path / "run")


def parts_of(client="a"):
    parts = []
    for index, row in enumerate(VALUES):
        sha256 = hashlib.sha256(row.tobytes()).hexdigest()
        parts.append(PartManifest(index, (Piece("w", "F32", (index, 0), (1, 2), sha256),)))
    listed = tuple(part.listed for part in parts)
    return UpdateManifest("r", 1, client, 0, "0" * 64, 5, 1.0, (), parts=listed), parts


def keep(store, root, part):
    with store.open_incoming(root.digest, part.num_bytes, part=part.index, whole_bytes=root.num_bytes) as upload:
        upload.append(VALUES[part.index].tobytes()[upload.position :])
        store.parts_of(root, root.digest).keep(upload, part, upload.inspect(part.pieces))


def whole(store, client="a"):
    root, parts = parts_of(client)
    for part in parts:
        keep(store, root, part)
    return root, store.keep_whole(root)


def values_of(store, root, meta):
    with UpdateReader(store.stored_update(root.digest, meta, None)) as reader:
        return reader.read(Tensor("w", "F32", (3, 2)), 0, 6)


def files(store, folder):
    return sorted(path.name for path in store.incoming_path("0" * 64).parents[1].joinpath(folder).iterdir())


def test_parts_that_are_made_whole_are_folded_with_what_was_found_in_all_of_them(store):
    root, kept = whole(store)
    meta = decode_meta(kept.meta, where="here")
    assert meta.manifest == root.encode()
    assert meta.magnitudes == {"w": 4.0}
    assert meta.squared_norms == {"w": float((VALUES**2).sum())}
    assert kept.data is None
    np.testing.assert_array_equal(values_of(store, root, meta), VALUES.reshape(-1))
    assert files(store, "incoming") == []
    assert store.digests() == {root.digest}


def test_a_part_is_kept_when_its_findings_are_there_and_its_size_is_right(store):
    root, parts = parts_of()
    with store.open_incoming(root.digest, 8, part=0, whole_bytes=24) as upload:
        upload.append(VALUES[0].tobytes())
    on_disk = store.parts_of(root, root.digest)
    assert on_disk.kept() == set(), "its bytes are there, unchecked"
    keep(store, root, parts[0])
    keep(store, root, parts[2])
    assert on_disk.kept() == {0, 2}
    assert list(on_disk.manifests({0, 2})) == [parts[0], parts[2]]
    os.truncate(store.incoming_path(root.digest, 2), 7)
    assert on_disk.kept() == {0}
    with pytest.raises(StoreCorrupted, match=r"0001\.bin: is incomplete, its manifest has 8 bytes"):
        on_disk.make_whole()


def test_equal_parts_of_two_clients_are_two_files(store):
    first, _ = whole(store, "a")
    second, kept = whole(store, "b")
    assert first.parts == second.parts
    store.collect_garbage({second.digest}, keep_versions=1, current=0)
    meta = decode_meta(kept.meta, where="here")
    np.testing.assert_array_equal(values_of(store, second, meta), VALUES.reshape(-1))
    assert store.digests() == {second.digest}


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (lambda data, findings: data.unlink(), "0001.bin: is incomplete"),
        (lambda data, findings: data.write_bytes(b"1234"), "0001.bin: is incomplete"),
        (lambda data, findings: findings.unlink(), "0001.bin: is incomplete"),
        (lambda data, findings: findings.write_bytes(b"\xff"), "0001.json: "),
        (lambda data, findings: findings.write_text("{}"), "not a StoredUpdateMeta"),
        (
            lambda data, findings: findings.write_text(findings.read_text().replace('\\"index\\":1', '\\"index\\":2')),
            "does not belong to the part that the update's manifest lists",
        ),
    ],
)
def test_a_part_that_is_gone_or_damaged_is_named_by_the_fold(store, spoil, fault):
    root, kept = whole(store)
    data = store.update_path(root.digest).with_name(f"{root.digest}.0001.bin")
    spoil(data, data.with_suffix(".json"))
    with pytest.raises(StoreCorrupted) as named:
        store.stored_update(root.digest, decode_meta(kept.meta, where="here"), None)
    assert fault in str(named.value)


def test_a_crash_anywhere_is_repaired_by_doing_it_again(tmp_path):
    """Nothing has to be sent again, and the update is whole or it is not."""
    for number in range(100):
        run = RunStore(tmp_path / f"run{number}")
        root, parts = parts_of()
        with pytest.MonkeyPatch.context() as patch:
            crash_at(patch, number)
            try:
                whole(run)
                finished = True
            except Crash:
                finished = False
        run = RunStore(tmp_path / f"run{number}")
        kept = run.parts_of(root, root.digest).kept()
        for part in parts:
            if part.index not in kept:
                begun = run.incoming_path(root.digest, part.index).exists()
                with run.open_incoming(root.digest, 8, part=part.index, whole_bytes=24) as upload:
                    assert upload.position == 8 * begun
                keep(run, root, part)
        meta = decode_meta(run.keep_whole(root).meta, where="here")
        np.testing.assert_array_equal(values_of(run, root, meta), VALUES.reshape(-1))
        run.collect_garbage({root.digest}, keep_versions=1, current=0)
        assert files(run, "incoming") == []
        assert len(files(run, "updates")) == 6
        if finished:
            break
    assert 10 < number < 99


def test_the_parts_of_an_upload_stay_and_go_together(store):
    root, parts = parts_of()
    for part in parts[:2]:
        keep(store, root, part)
    for name in files(store, "incoming"):
        os.utime(store.incoming_path(root.digest).with_name(name), (1000.0, 1000.0))
    newest = store.incoming_path(root.digest, 1)
    os.utime(newest, (2000.0, 2000.0))
    asked = []

    def rule(digest, at):
        asked.append((digest, at))
        return at >= 2000.0

    store.collect_garbage([], keep_versions=1, current=0, keep_incoming=rule)
    assert len(files(store, "incoming")) == 4
    assert set(asked) == {(root.digest, 2000.0)}, "the age is that of its newest byte"
    with store.open_incoming(root.digest, 8, part=2, whole_bytes=24):
        store.collect_garbage([], keep_versions=1, current=0, keep_incoming=lambda *_: False)
        assert len(files(store, "incoming")) == 5, "one part comes, so all stay"
    store.collect_garbage([], keep_versions=1, current=0, keep_incoming=lambda *_: False)
    assert files(store, "incoming") == []


def test_findings_that_a_crash_left_half_written_go_too(store):
    root, _ = parts_of()
    for folder in (store.incoming_path(root.digest), store.update_path(root.digest)):
        folder.with_name(f"{root.digest}.0000.json.part").touch()
    store.collect_garbage([], keep_versions=1, current=0, keep_incoming=lambda *_: False)
    assert files(store, "incoming") == files(store, "updates") == []


def test_a_discarded_part_begins_again_and_the_others_stay(store):
    root, parts = parts_of()
    keep(store, root, parts[0])
    with store.open_incoming(root.digest, 8, part=1, whole_bytes=24) as upload:
        upload.append(b"1234")
    store.discard_incoming(root.digest, 1)
    assert store.parts_of(root, root.digest).kept() == {0}
    with store.open_incoming(root.digest, 8, part=1, whole_bytes=24) as upload:
        assert upload.position == 0
    other = replace(root, client_id="b")
    keep(store, other, parts[0])
    store.discard_incoming(root.digest)
    assert store.digests() == {other.digest}


# ---------------------------------------------------------------- spread over ranks


def settled(store, *indices):
    """Keep some parts as an aggregation rank does."""
    root, parts = parts_of()
    for index in indices:
        with store.open_incoming(root.digest, 8, part=index) as upload:
            upload.append(VALUES[index].tobytes()[upload.position :])
            on_disk = store.parts_of(root, root.digest)
            on_disk.keep(upload, parts[index], upload.inspect(parts[index].pieces))
        assert on_disk.settle(index)
    return root


def test_a_rank_reads_its_parts_and_zeros_for_the_others(tmp_path):
    stores = [RunStore(tmp_path / f"rank{rank}") for rank in range(3)]
    root = settled(stores[0], 0, 2)
    settled(stores[1], 1)
    meta = StoredUpdateMeta(root.encode(), {"w": 4.0}, {"w": 1.0}, 0, (0, 1, 0))
    found = []
    for rank, store in enumerate(stores[:2]):
        with UpdateReader(store.stored_update(root.digest, meta, None, rank=rank)) as reader:
            found.append(reader.read(Tensor("w", "F32", (3, 2)), 0, 6))
    np.testing.assert_array_equal(found[0], [1.0, -2.0, 0.0, 0.0, 0.0, -4.0])
    np.testing.assert_array_equal(found[0] + found[1], VALUES.reshape(-1))
    assert stores[2].stored_update(root.digest, meta, None, rank=2).pieces == ()
    with pytest.raises(StoreCorrupted, match=r"0001\.bin: is incomplete"):
        stores[0].stored_update(root.digest, meta, None, rank=1)


def test_a_settled_part_is_only_discarded_with_its_update(store):
    root = settled(store, 0)
    assert files(store, "incoming") == []
    store.discard_incoming(root.digest)
    assert store.parts_of(root, root.digest).kept() == {0}
    store.discard_parts(root.digest)
    assert files(store, "updates") == []
    assert not store.parts_of(root, root.digest).settle(0)


def test_a_crash_while_a_part_settles_loses_no_byte_and_keeps_none_unchecked(tmp_path):
    for number in range(100):
        run = RunStore(tmp_path / f"run{number}")
        with pytest.MonkeyPatch.context() as patch:
            crash_at(patch, number)
            try:
                settled(run, 1)
                finished = True
            except Crash:
                finished = False
        root, _ = parts_of()
        run = RunStore(tmp_path / f"run{number}")
        if not run.parts_of(root, root.digest).settle(1):
            settled(run, 1)
        assert files(run, "updates") == [f"{root.digest}.0001.bin", f"{root.digest}.0001.json"]
        if finished:
            break
    assert 5 < number < 99


def test_room_is_reserved_for_one_part_alone_where_the_others_go_elsewhere(store):
    with store.open_incoming("1" * 64, 10, part=0):
        assert store._reserved("2" * 64) == 10
    with store.open_incoming("1" * 64, 10, part=0, whole_bytes=500):
        assert store._reserved("2" * 64) == 500


def test_the_coordinators_notes_merge_what_was_found_and_name_the_ranks(store):
    root, parts = parts_of()
    notes = store.notes_of(root, root.digest)
    for part, magnitude in zip(parts, (2.0, 3.0, 4.0), strict=True):
        notes.note(part.index, StoredUpdateMeta(part.encode(), {}, {}))
        notes.note(part.index, StoredUpdateMeta(part.encode(), {"w": magnitude}, {"w": magnitude**2}))
    assert list(notes.manifests()) == parts
    spread = notes.whole((1, 0, 1))
    assert spread == StoredUpdateMeta(root.encode(), {"w": 4.0}, {"w": 29.0}, 1, (1, 0, 1))
    assert (spread.parts_at(0), spread.parts_at(1), spread.parts_at(2)) == ((1,), (0, 2), ())
    together = notes.whole((2, 2, 2))
    assert (together.rank, together.ranks, together.parts_at(2)) == (2, (), None)
    notes.discard()
    with pytest.raises(StoreCorrupted):
        list(notes.manifests())


def test_a_part_that_was_damaged_while_no_process_ran_is_named(store, tmp_path):
    root, kept = whole(store)
    file = next(path for path in tmp_path.rglob("*.bin"))
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    again = RunStore(tmp_path / "run")
    with pytest.raises(StoreCorrupted, match="its bytes do not match its manifest"):
        again.stored_update(root.digest, decode_meta(kept.meta, where="here"), None)
