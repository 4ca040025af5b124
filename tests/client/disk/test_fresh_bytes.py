"""The fresh bytes of a training's noise: the same until they are forgotten, and never again."""

import stat
from pathlib import Path

import pytest

from atoll.client.disk import fresh_bytes
from atoll.client.disk.fresh_bytes import FOLDER, FreshBytes
from atoll.protocol.vocabulary import RoundId, RunId

RUN, ROUND = RunId("r-1"), RoundId(4)


def test_they_are_the_same_for_the_same_work_also_in_another_process_and_its_owner_alone_reads_them(
    tmp_path: Path,
) -> None:
    first = FreshBytes(tmp_path).made(RUN, ROUND, "work")
    assert len(first) == 32
    assert FreshBytes(tmp_path).made(RUN, ROUND, "work") == first
    [file] = (tmp_path / FOLDER).iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    name = FreshBytes(tmp_path).name_of(RUN, ROUND, "work")
    assert len(name) == 32
    assert name not in first.hex(), "a name tells nothing of the bytes"


def test_other_content_and_what_was_forgotten_or_damaged_has_others(tmp_path: Path) -> None:
    fresh = FreshBytes(tmp_path)
    seen = [fresh.made(RUN, ROUND, "work"), fresh.made(RUN, ROUND, "other"), fresh.made(RUN, ROUND, "work")]
    fresh.forget(RUN, ROUND)
    assert fresh.name_of(RUN, ROUND, "work") == ""
    fresh.forget(RUN, ROUND)
    seen.append(fresh.made(RUN, ROUND, "work"))
    [file] = (tmp_path / FOLDER).iterdir()
    for damage in (b"", b"[]", b'{"content": "work", "bytes": "00"}', b'{"content": "work", "bytes": 7}', b"\xff"):
        file.write_bytes(damage)
        seen.append(fresh.made(RUN, ROUND, "work"))
    assert len({*seen}) == len(seen)


def test_a_newer_round_and_the_end_of_the_run_delete_those_of_the_run_alone(tmp_path: Path) -> None:
    fresh, odd = FreshBytes(tmp_path), RunId("../run")
    for run in (RUN, RunId("r-10"), RunId("run"), odd):
        fresh.made(run, ROUND, "work")
    kept = fresh.made(odd, ROUND, "work")
    fresh.made(RUN, RoundId(11), "work")
    assert fresh.name_of(RUN, ROUND, "work") == ""
    assert fresh.name_of(RUN, RoundId(11), "work")
    for ended in (RUN, RunId("run"), RunId("none")):
        fresh.forget_run(ended)
    assert len([*(tmp_path / FOLDER).iterdir()]) == 2
    assert fresh.made(odd, ROUND, "work") == kept
    fresh.forget_run(odd)
    assert fresh.name_of(odd, ROUND, "work") == ""


def test_a_deletion_whose_flush_failed_is_flushed_when_it_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update that left before would have the noise of another training if the power fails and the file is back."""
    fresh, flushed, failures = FreshBytes(tmp_path), [], [OSError("the disk fails")]

    def sync(folder: Path) -> None:
        if failures:
            raise failures.pop()
        flushed.append(folder)

    fresh.made(RUN, ROUND, "work")
    monkeypatch.setattr(fresh_bytes, "sync_folder", sync)
    with pytest.raises(OSError, match="the disk fails"):
        fresh.forget(RUN, ROUND)
    fresh.forget(RUN, ROUND)
    assert flushed == [tmp_path / FOLDER]


def test_the_folder_of_the_first_bytes_is_durable_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[Path] = []
    monkeypatch.setattr(fresh_bytes, "sync_folder", flushed.append)
    for round_id in (ROUND, RoundId(ROUND + 1)):
        FreshBytes(tmp_path).made(RUN, round_id, "work")
    assert flushed == [tmp_path, tmp_path / FOLDER, tmp_path / FOLDER]


def test_bytes_that_cannot_be_read_or_written_are_an_error(tmp_path: Path) -> None:
    """No training begins with others, and no update leaves while they are there."""
    fresh = FreshBytes(tmp_path)
    fresh.made(RUN, ROUND, "work")
    [file] = (tmp_path / FOLDER).iterdir()
    file.unlink()
    file.mkdir()
    for act in (lambda: fresh.made(RUN, ROUND, "work"), lambda: fresh.forget(RUN, ROUND)):
        with pytest.raises(OSError, match="director"):
            act()
