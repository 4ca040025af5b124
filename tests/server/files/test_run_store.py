import errno
import os
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from atoll.ground.durable import DiskFull, naming_full_disk, write_atomically
from atoll.protocol.manifest import UpdateManifest, digest_of
from atoll.server.errors import StoreCorrupted
from atoll.server.files import incoming
from atoll.server.files import run_store as store_module
from atoll.server.files.disk_limits import DiskLimits
from atoll.server.files.incoming import SMALL_BYTES
from atoll.server.files.run_store import RunStore
from atoll.server.journal.codec import decode_meta
from atoll.tensors.layout import Piece, Tensor
from atoll.tensors.safetensors_file import TensorFileCorrupted
from atoll.tensors.updates.reader import UpdateReader

VALUES = np.array([1.0, -2.0, 2.0], np.float32)
SHA = __import__("hashlib").sha256(VALUES.tobytes()).hexdigest()
DIGESTS = [f"{number:064x}" for number in range(20)]


def update_manifest(client="a"):
    return UpdateManifest("r", 1, client, 0, "0" * 64, 5, 1.0, (Piece("w", "F32", (0,), (3,), SHA),))


@pytest.fixture(autouse=True)
def small_bytes(monkeypatch):
    """Give every update a file; the returned function restores the limit."""
    monkeypatch.setattr(incoming, "SMALL_BYTES", 0)
    return lambda: monkeypatch.setattr(incoming, "SMALL_BYTES", SMALL_BYTES)


@pytest.fixture
def store(tmp_path):
    return RunStore(tmp_path / "run")


def received(store, client="a"):
    """Return an update that is complete and not yet kept."""
    manifest = update_manifest(client)
    with store.open_incoming(manifest.digest, manifest.num_bytes) as upload:
        upload.append(VALUES.tobytes()[upload.position :])
    return manifest


def kept(store, client="a"):
    manifest = update_manifest(client)
    with store.open_incoming(manifest.digest, manifest.num_bytes) as upload:
        upload.append(VALUES.tobytes()[upload.position :])
        return store.keep(upload, manifest, upload.inspect(manifest.pieces))


def stored(store, client="a"):
    return digest_of(meta_of(kept(store, client)).manifest)


def meta_of(update):
    return decode_meta(update.meta, where="here")


def stored_update(store, digest, update):
    return store.stored_update(digest, meta_of(update), update.data)


def is_stored(store, client="a"):
    update = store.kept_before(update_manifest(client))
    return update is not None and stored_update(store, update_manifest(client).digest, update).data is None


def files(store):
    root = store.version_path(0).parent.parent
    return sorted(str(path.relative_to(root)) for path in root.rglob("*/*") if not path.is_dir())


def make_versions(store, numbers):
    for number in numbers:
        store.version_path(number).write_bytes(b"x" * 100)
        store.write_manifest(number, b"{}")


# ---------------------------------------------------------------- uploads


def test_an_upload_goes_on_where_it_stopped(store):
    with store.open_incoming(DIGESTS[1], 10) as upload:
        assert upload.position == 0
        upload.append(b"0123")
        upload.append(b"")
    with store.open_incoming(DIGESTS[1], 10) as upload:
        assert upload.position == 4
        upload.append(b"456789")
        assert upload.position == 10
    assert store.incoming_path(DIGESTS[1]).read_bytes() == b"0123456789"


def test_an_upload_survives_the_process(store, tmp_path):
    with store.open_incoming(DIGESTS[1], 10) as upload:
        upload.append(b"0123")
    with RunStore(tmp_path / "run").open_incoming(DIGESTS[1], 10) as upload:
        assert upload.position == 4


def test_an_upload_never_grows_beyond_what_was_announced(store):
    with store.open_incoming(DIGESTS[1], 4) as upload:
        upload.append(b"012")
        with pytest.raises(ValueError, match="2 bytes at 3 would go beyond the announced 4"):
            upload.append(b"34")
        assert upload.position == 3


def test_a_file_that_is_too_long_is_cut(store):
    store.incoming_path(DIGESTS[1]).write_bytes(b"0123456789")
    with store.open_incoming(DIGESTS[1], 4) as upload:
        assert upload.position == 4
    assert store.incoming_path(DIGESTS[1]).read_bytes() == b"0123"


def test_a_small_upload_has_no_file_and_begins_again_when_it_was_cut(store, small_bytes):
    small_bytes()
    with store.open_incoming(DIGESTS[1], SMALL_BYTES) as upload:
        upload.append(b"01")
        upload.append(b"23")
        assert (upload.position, upload.data) == (4, b"0123")
        with pytest.raises(ValueError, match="at 4 would go beyond"):
            upload.append(bytes(SMALL_BYTES - 3))
    assert files(store) == []
    with store.open_incoming(DIGESTS[1], SMALL_BYTES) as upload:
        assert upload.position == 0
    with store.open_incoming(DIGESTS[1], SMALL_BYTES + 1) as upload:
        assert upload.data is None
        assert files(store) == [f"incoming/{DIGESTS[1]}.bin"]


def test_two_uploads_of_one_update_do_no_harm_to_each_other(store):
    with store.open_incoming(DIGESTS[1], 6) as first:
        first.append(b"01")
        with store.open_incoming(DIGESTS[1], 6) as second:
            second.append(b"23")
            first.append(b"2345")
            second.append(b"45")
    assert store.incoming_path(DIGESTS[1]).read_bytes() == b"012345"


def test_a_discarded_upload_begins_again(store):
    with store.open_incoming(DIGESTS[1], 6) as upload:
        upload.append(b"01")
    store.discard_incoming(DIGESTS[1])
    store.discard_incoming(DIGESTS[1])
    with store.open_incoming(DIGESTS[1], 6) as upload:
        assert upload.position == 0


def test_an_upload_never_goes_through_a_link(store, tmp_path):
    (tmp_path / "precious").write_bytes(b"precious")
    store.incoming_path(DIGESTS[1]).symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic links"):
        store.open_incoming(DIGESTS[1], 4)
    assert (tmp_path / "precious").read_bytes() == b"precious"


@pytest.mark.parametrize("digest", ["", "../../etc/passwd", "A" * 64, "0" * 63, "0" * 64 + "\n"])
def test_a_digest_is_never_a_path_of_another_kind(store, digest):
    for method in (store.incoming_path, store.update_path, store.discard_incoming):
        with pytest.raises(ValueError, match="digest"):
            method(digest)


# ---------------------------------------------------------------- room


def with_free(monkeypatch, free):
    monkeypatch.setattr(store_module.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))


def test_an_upload_beyond_the_disk_margin_is_refused_before_its_first_byte(tmp_path, monkeypatch):
    store = RunStore(tmp_path / "run", disk=DiskLimits(free_min=100))
    with_free(monkeypatch, 1000)
    with pytest.raises(DiskFull, match=r"an update of 901 B does not fit: 1\.0 kB are free"):
        store.open_incoming(DIGESTS[1], 901)
    assert files(store) == []
    with store.open_incoming(DIGESTS[1], 900):
        pass


def test_what_was_promised_to_open_uploads_is_not_promised_again(tmp_path, monkeypatch):
    store = RunStore(tmp_path / "run", disk=DiskLimits(free_min=100))
    with_free(monkeypatch, 1000)
    with store.open_incoming(DIGESTS[1], 600) as first:
        with pytest.raises(DiskFull, match="600 B are reserved for other uploads"):
            store.open_incoming(DIGESTS[2], 301)
        first.append(b"x" * 200)
        with store.open_incoming(DIGESTS[2], 500):
            pass
    with store.open_incoming(DIGESTS[2], 900):
        pass


def test_a_complete_upload_needs_no_room(store, monkeypatch):
    manifest = received(store)
    with_free(monkeypatch, 0)
    with store.open_incoming(manifest.digest, manifest.num_bytes) as upload:
        assert upload.position == manifest.num_bytes


def test_a_full_disk_has_one_name_and_other_failures_keep_theirs(tmp_path):
    for number in (errno.ENOSPC, errno.EDQUOT):
        with pytest.raises(DiskFull, match="here: no room"), naming_full_disk("here"):
            raise OSError(number, os.strerror(number))
    with pytest.raises(OSError, match="Input/output") as caught, naming_full_disk("here"):
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    assert not isinstance(caught.value, DiskFull)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_what_was_written_before_the_disk_was_full_counts(store, monkeypatch):
    with store.open_incoming(DIGESTS[1], 10) as upload:
        upload.append(b"0123")
        real, upload._file = upload._file, os.open("/dev/full", os.O_RDWR)
        with pytest.raises(DiskFull):
            upload.append(b"456")
        os.close(upload._file)
        upload._file = real
        assert upload.position == 4
        upload.append(b"456789")
    assert store.incoming_path(DIGESTS[1]).read_bytes() == b"0123456789"


def test_disk_usage_is_told_by_folder(store):
    make_versions(store, [0])
    stored(store)
    with store.open_incoming(DIGESTS[1], 6) as upload:
        upload.append(b"01")
    assert store.disk_usage() == {"versions": 102, "updates": 12, "incoming": 2}


# ---------------------------------------------------------------- accepted updates


@pytest.mark.parametrize("is_small", [False, True])
def test_a_kept_update_can_be_folded(store, tmp_path, small_bytes, is_small):
    if is_small:
        small_bytes()
    update = kept(store)
    manifest = update_manifest()
    assert files(store) == ([] if is_small else [f"updates/{manifest.digest}.bin"])
    assert meta_of(update).manifest == manifest.encode()
    assert meta_of(update).norm == 3.0
    readable = stored_update(RunStore(tmp_path / "run"), manifest.digest, update)  # in the next process
    assert readable.magnitudes == {"w": 2.0}
    with UpdateReader(readable) as reader:
        assert reader.read(Tensor("w", "F32", (3,)), 0, 3).tolist() == VALUES.tolist()


@pytest.mark.parametrize("is_small", [False, True])
def test_an_update_may_be_sent_and_kept_again(store, small_bytes, is_small):
    if is_small:
        small_bytes()
    assert kept(store) == kept(store)


def test_an_update_that_was_kept_before_is_found_and_a_small_one_is_not(store, small_bytes):
    assert store.kept_before(update_manifest()) is None
    assert kept(store, "b") == store.kept_before(update_manifest("b"))
    small_bytes()
    kept(store, "c")
    assert store.kept_before(update_manifest("c")) is None


@pytest.mark.parametrize("data", [bytes(12), bytes(11), VALUES.tobytes() + b"x", b""])
def test_an_update_that_lost_its_bytes_with_the_power_must_be_sent_again(store, data):
    digest = stored(store)
    store.update_path(digest).write_bytes(data)
    assert store.kept_before(update_manifest()) is None
    assert files(store) == []


@pytest.mark.parametrize("is_small", [False, True])
def test_an_incomplete_upload_is_noticed(store, small_bytes, is_small):
    if is_small:
        small_bytes()
    manifest = update_manifest()
    with store.open_incoming(manifest.digest, manifest.num_bytes) as upload:
        upload.append(b"01")
        with pytest.raises(TensorFileCorrupted, match="ends at byte 2, 10 bytes too early"):
            upload.inspect(manifest.pieces)


def test_what_is_known_of_another_update_is_named(store):
    with pytest.raises(StoreCorrupted, match="its manifest has another digest"):
        stored_update(store, stored(store), kept(store, "b"))


@pytest.mark.parametrize(
    ("data", "fault"), [(b"\0" * 12, "its bytes do not match its manifest"), (b"", "has 0 bytes, its manifest 12")]
)
def test_damaged_bytes_of_a_small_update_are_named(store, small_bytes, data, fault):
    small_bytes()
    update = kept(store)
    with pytest.raises(StoreCorrupted, match=f"{update_manifest().digest}.bin: {fault}"):
        stored_update(store, update_manifest().digest, replace(update, data=data))


def test_an_update_whose_file_is_gone_is_named(store):
    update, path = kept(store), store.update_path(update_manifest().digest)
    path.unlink()
    with pytest.raises(StoreCorrupted, match=path.name):
        stored_update(store, update_manifest().digest, update)


def test_an_update_of_another_size_is_named(store):
    update, digest = kept(store), update_manifest().digest
    os.truncate(store.update_path(digest), 8)
    with pytest.raises(StoreCorrupted, match="has 8 bytes, its manifest 12"):
        stored_update(store, digest, update)


@pytest.mark.parametrize("byte", range(12))
def test_bytes_that_were_damaged_while_no_process_ran_are_named(store, tmp_path, byte):
    update, digest = kept(store), update_manifest().digest
    path = store.update_path(digest)
    data = bytearray(path.read_bytes())
    data[byte] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreCorrupted, match=f"{path.name}: its bytes do not match its manifest"):
        stored_update(RunStore(tmp_path / "run"), digest, update)


class Crash(BaseException):
    """The simulated death of the process."""


def crash_at(monkeypatch, number):
    """Die before the n-th change of a name or a content on disk."""
    left = [number]

    def counted(function):
        def wrapper(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                raise Crash
            return function(*args, **kwargs)

        return wrapper

    for name in ("replace", "unlink", "fsync", "fdatasync"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))


def test_a_crash_anywhere_in_keeping_an_update_is_repaired_by_doing_it_again(store, tmp_path):
    for number in range(20):
        run = RunStore(tmp_path / f"run{number}")
        manifest = received(run)
        with pytest.MonkeyPatch.context() as patch:
            crash_at(patch, number)
            try:
                stored(run)
                finished = True
            except Crash:
                finished = False
        assert is_stored(run) or not finished
        run = RunStore(tmp_path / f"run{number}")
        assert run.has_file(manifest.digest) == is_stored(run)
        if not run.has_file(manifest.digest):
            with run.open_incoming(manifest.digest, manifest.num_bytes) as upload:
                assert upload.position == manifest.num_bytes  # nothing has to be sent again
            stored(run)
        assert is_stored(run)
        run.collect_garbage([manifest.digest], keep_versions=1, current=0)
        assert is_stored(run)
        if finished:
            break
    assert 3 <= number <= 8


# ---------------------------------------------------------------- versions


def test_a_version_exists_when_it_has_its_manifest(store):
    make_versions(store, [0, 1, 12])
    store.version_path(13).write_bytes(b"x")
    store.manifest_path(15).with_suffix(".json.part").write_bytes(b"{}")
    assert store.versions() == [0, 1, 12]
    assert store.version_path(12).name == "000012.safetensors"
    assert store.manifest_path(1234567).name == "1234567.manifest.json"
    assert store.read_manifest(12) == b"{}"
    with pytest.raises(FileNotFoundError):
        store.read_manifest(13)


def test_a_small_file_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "small"
    write_atomically(path, b"old")
    for number in range(4):
        with pytest.MonkeyPatch.context() as patch:
            crash_at(patch, number)
            try:
                write_atomically(path, b"new and longer")
                break
            except Crash:
                assert path.read_bytes() == (b"old" if number < 2 else b"new and longer")
                path.write_bytes(b"old")
    assert number == 3
    assert [entry.name for entry in tmp_path.iterdir()] == ["small"]


# ---------------------------------------------------------------- garbage


def test_old_versions_go_and_the_initial_the_current_and_the_pinned_stay(store):
    make_versions(store, range(10))
    store.version_path(3).with_name("000003.safetensors.part").write_bytes(b"x")
    store.version_path(10).with_name("000010.safetensors.part").write_bytes(b"being folded")
    store.version_path(10).write_bytes(b"x")
    freed = store.collect_garbage([], keep_versions=2, current=9, pinned={4})
    assert freed == 6 * 102 + 1
    assert store.versions() == [0, 4, 8, 9]
    assert store.version_path(10).exists()
    assert store.version_path(10).with_name("000010.safetensors.part").exists()
    assert store.collect_garbage([], keep_versions=2, current=9, pinned={4}) == 0


def test_a_version_that_a_fold_has_just_written_is_not_old(store):
    make_versions(store, range(4))
    store.collect_garbage([], keep_versions=1, current=2)
    assert store.versions() == [0, 2, 3]


def test_updates_that_nobody_needs_go(store):
    digests = [stored(store, client) for client in "abc"]
    store.update_path(DIGESTS[5]).write_bytes(b"left behind by a crash")
    store.collect_garbage(digests[:1], keep_versions=1, current=0)
    assert files(store) == [f"updates/{digests[0]}.bin"]


def test_uploads_go_when_the_rule_says_so_and_never_while_they_are_open_or_live(store):
    for digest in DIGESTS[:4]:
        with store.open_incoming(digest, 10) as upload:
            upload.append(b"0123")
        os.utime(store.incoming_path(digest), (1000.0, 1000.0))
    asked = []

    def rule(digest, at):
        asked.append((digest, at))
        return digest == DIGESTS[3]

    with store.open_incoming(DIGESTS[0], 10):
        store.collect_garbage([DIGESTS[1]], keep_versions=1, current=0, keep_incoming=rule)
    assert sorted(asked) == [(DIGESTS[2], 1000.0), (DIGESTS[3], 1000.0)]
    assert files(store) == [f"incoming/{DIGESTS[number]}.bin" for number in (0, 1, 3)]


def test_an_upload_is_given_a_day_to_go_on(store):
    for digest in DIGESTS[:2]:
        with store.open_incoming(digest, 10) as upload:
            upload.append(b"0123")
    os.utime(store.incoming_path(DIGESTS[0]), (1000.0, 1000.0))
    store.collect_garbage([], keep_versions=1, current=0)
    assert files(store) == [f"incoming/{DIGESTS[1]}.bin"]


def test_garbage_is_never_collected_through_a_link_and_foreign_files_stay(store, tmp_path):
    (tmp_path / "precious").write_bytes(b"precious")
    store.update_path(DIGESTS[1]).symlink_to(tmp_path / "precious")
    store.update_path(DIGESTS[2]).mkdir()
    store.update_path(DIGESTS[1]).with_name("README").write_bytes(b"mine")
    store.collect_garbage([], keep_versions=1, current=0)
    assert (tmp_path / "precious").read_bytes() == b"precious"
    assert store.update_path(DIGESTS[2]).is_dir()
    assert store.update_path(DIGESTS[1]).is_symlink()
    assert store.update_path(DIGESTS[1]).with_name("README").exists()


def test_a_folder_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "updates").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NotADirectoryError, match="is a link"):
        RunStore(tmp_path / "run")


def test_a_crash_anywhere_in_a_collection_leaves_the_rest_to_the_next_one(store, tmp_path):
    make_versions(store, range(6))
    live = stored(store, "a")
    for client in "bcd":
        stored(store, client)
    root = tmp_path / "run"
    for number in range(40):
        copy = tmp_path / f"copy{number}"
        shutil.copytree(root, copy)
        with pytest.MonkeyPatch.context() as patch:
            crash_at(patch, number)
            try:
                RunStore(copy).collect_garbage([live], keep_versions=2, current=5)
                finished = True
            except Crash:
                finished = False
        run = RunStore(copy)
        assert {0, 4, 5} <= set(run.versions())
        assert is_stored(run)
        for version in run.versions():
            assert run.read_manifest(version) == b"{}"
            assert run.version_path(version).stat().st_size == 100
        run.collect_garbage([live], keep_versions=2, current=5)
        assert run.versions() == [0, 4, 5]
        assert files(run) == sorted(
            [f"updates/{live}.bin"]
            + [f"versions/{v:06d}.{end}" for v in (0, 4, 5) for end in ("safetensors", "manifest.json")]
        )
        if finished:
            break
    assert 10 <= number < 39


def test_updates_on_a_volume_of_their_own_are_kept(store, other_disk, monkeypatch):
    monkeypatch.setattr(store, "_updates", other_disk)  # as a mount: a link is refused
    stored(store)
    assert is_stored(store)
    assert list(other_disk.iterdir()) == [store.update_path(update_manifest("a").digest)]
