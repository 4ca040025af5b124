"""The display of progress: a bar that goes away however the work ends, and lines now and then."""

import io

import pytest

from atoll.cli.training.progress import progress
from atoll.cli.waiting import Progress

SHOW_CURSOR = "\x1b[?25h"


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_lines_come_now_and_then_and_the_last_one_always() -> None:
    said: list[str] = []
    with Progress("step", io.StringIO(), said.append, every_s=10.0) as shown:
        shown.begin(5)
        for done, at in ((1, 0.0), (2, 9.9), (3, 10.0), (4, 12.0)):
            shown.show(done, 5, "loss 0.1", at=at)
        shown.show(5, 5, "loss 0.1", at=12.5, is_last=True)
        shown.tell("a word between")
    assert said == [*(f"step {done}/5  loss 0.1" for done in (1, 3, 5)), "a word between"]


def test_the_bar_of_a_training_that_fails_goes_away_and_gives_the_cursor_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()

    def fail() -> None:
        with progress(terminal, lambda _: None) as report:
            report({"event": "begin", "step": 3, "steps": 12, "train": {}})
            assert SHOW_CURSOR not in terminal.getvalue()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert "3/12" in terminal.getvalue()
    assert "resuming from step 3" in terminal.getvalue()
    assert SHOW_CURSOR in terminal.getvalue()
