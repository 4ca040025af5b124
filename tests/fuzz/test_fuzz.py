"""The fuzzing itself: it is repeatable, and it bites."""

import base64
import re

import pytest

from tests.fuzz import run
from tests.fuzz.__main__ import main
from tests.fuzz.run import Found, bounded_memory, feed, inputs, peak_bytes
from tests.fuzz.targets import TARGETS, Target

NAME = "header of safetensors"


def test_the_same_seed_gives_the_same_inputs_from_any_block_on() -> None:
    first = list(inputs(NAME, 1, 0, 3000))
    corpus = len(TARGETS[NAME].corpus)
    assert first[:corpus] == list(TARGETS[NAME].corpus)
    assert list(inputs(NAME, 1, 2000, 3000)) == first[corpus + 2000 :]
    assert list(inputs(NAME, 2, 2000, 3000)) != first[corpus + 2000 :]
    assert len(set(first)) > 2500


def test_a_parser_that_breaks_is_found_with_the_input_that_breaks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(data: bytes) -> None:
        if b"99999" in data:
            raise KeyError(data)

    monkeypatch.setitem(run.TARGETS, "broken", Target(broken, (ValueError,), [b"8"]))
    with pytest.raises(Found, match="KeyError") as caught:
        feed("broken", inputs("broken", 1, 0, 1000))
    encoded = re.search(r"--replay (\S+)", str(caught.value))
    assert encoded is not None
    with pytest.raises(Found):
        feed("broken", [base64.b64decode(encoded[1])])


def test_a_parser_that_takes_too_much_memory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(run.TARGETS, "greedy", Target(lambda data: bytearray(2**30), (ValueError,), [b"8"]))
    with bounded_memory(), pytest.raises(Found, match="MemoryError"):
        feed("greedy", [b"8"])
    monkeypatch.setitem(run.TARGETS, "fat", Target(lambda data: bytearray(2**23), (ValueError,), [b"8"]))
    assert peak_bytes("fat", [b"8"]) > run.PEAK_MAX


@pytest.mark.real
def test_an_input_is_replayed_and_a_short_search_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--target", "checkpoint", "--replay", "Nzo="]) == 0
    assert capsys.readouterr().out == "Outcome(accepted=0, refused=1)\n"
    assert main(["--target", "checkpoint", "--inputs", "2000", "--jobs", "1", "--seed", "3"]) == 0
    assert "--seed 3" in capsys.readouterr().out
