"""The verdicts on a log: verified beside, one at a time, and not again at each look."""

import os
import threading
from pathlib import Path

import pytest

from atoll.dashboard import sources
from atoll.dashboard.sources import Verdicts
from atoll.interface.errors import AtollError
from atoll.interface.places import Simulations
from tests.waiting import BOUND_S

FOUND = {"num_faults": 0, "first": 0}


def test_a_long_verification_runs_once_while_pages_are_read() -> None:
    verdicts, may_end, begun = Verdicts(), threading.Event(), list[int]()

    def verify() -> dict[str, int]:
        begun.append(1)
        assert may_end.wait(BOUND_S)
        return FOUND

    assert [verdicts.newest(verify).at for _ in range(3)] == [None] * 3
    may_end.set()
    verdicts._thread.join(BOUND_S)
    found = verdicts.newest(verify)
    assert (found.verdict, found.sentence) == (FOUND, "sound: nothing is changed, missing or out of order")
    assert verdicts.newest(verify) == found
    assert begun == [1]


def test_a_verification_that_is_refused_says_why_and_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "AGAIN_S", 0.0)
    monkeypatch.setattr(sources, "REST", 0)
    verdicts, faults = Verdicts(), ["no answer"]

    def verify() -> dict[str, int]:
        if faults:
            raise AtollError(faults.pop())
        return FOUND

    verdicts.newest(verify)
    verdicts._thread.join(BOUND_S)
    assert verdicts._found.sentence == "no answer"
    verdicts.newest(verify)
    verdicts._thread.join(BOUND_S)
    assert verdicts._found.verdict == FOUND


def test_no_page_has_the_password_of_a_database() -> None:
    (source,) = sources.sources(["postgresql://ann:secret@hub.example.org/atoll"])
    assert source.label == "postgresql://ann@hub.example.org/atoll"


def test_a_folder_whose_name_is_no_text_hides_no_other(tmp_path: Path) -> None:
    for name in (b"one", b"\xff"):
        folder = os.path.join(os.fsencode(tmp_path), name)
        os.mkdir(folder)
        Path(os.fsdecode(folder), "rounds.jsonl").touch()
    assert Simulations(tmp_path).names == ["one"]
