import io

import pytest

from atoll.cli.experiments.simulation_progress import RoundProgress
from tests.simulations.experiments.runs import line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_there_is_a_line_a_second_and_one_at_the_end() -> None:
    said: list[str] = []
    progress = RoundProgress(io.StringIO(), said.append, rounds=4)
    for number in (1, 2, 3, 4):
        progress.round(line(number, real_s=0.4 * number))
    assert [text.split("  ")[0] for text in said] == ["round 1/4", "round 4/4"]


def test_a_line_says_how_it_goes() -> None:
    said: list[str] = []
    RoundProgress(io.StringIO(), said.append, rounds=4).round(line(1))
    assert said == ["round 1/4  accuracy 0.5000  6.0 s left  virtual 100.0 s  10/13 reported, 2 stragglers, 1 lost"]


def test_a_round_without_an_evaluation_shows_the_value_before_it() -> None:
    said: list[str] = []
    progress = RoundProgress(io.StringIO(), said.append, rounds=4)
    progress.round(line(1))
    progress.round(line(2, server=None, train=None))
    assert "accuracy 0.5000" in said[1]


def test_an_abandoned_round_says_why_and_is_none_of_the_rounds() -> None:
    said: list[str] = []
    progress = RoundProgress(io.StringIO(), said.append, rounds=4)
    progress.round(line(1, version=None, state="abandoned", why="3 of 5 at the deadline", server=None, train=None))
    assert said == [
        "round 0/4  - left  virtual 100.0 s  10/13 reported, 2 stragglers, 1 lost  abandoned: 3 of 5 at the deadline"
    ]


def test_a_round_and_the_run_show_the_most_frequent_reason_of_failures() -> None:
    said: list[str] = []
    progress = RoundProgress(io.StringIO(), said.append, rounds=4)
    assert progress.faults == []
    odd = {"a": "out_of_time: none", "b": "not_finite: in w\nand v", "c": "not_finite: in v"}
    progress.round(line(1, failed=3, failures=odd))
    assert said[0].endswith("10/13 reported, 2 stragglers, 1 lost, 3 failed (not_finite: in w and v)")
    progress.round(line(2, failed=1, failures={"c": "not_finite: in v"}))
    refused = "wrong_layout: w is missing"
    progress.round(line(3, refused=1, lost=1, refusals={"a": refused}, losses={"b": "left"}))
    assert said[-1].endswith(f"1 lost (left), 1 refused ({refused})")
    assert progress.faults == [
        "4 failures of clients: 3 x not_finite: in w and v",
        f"1 refusal of clients: {refused}",
        "1 loss of clients: left",
    ]


def test_a_round_and_the_run_name_the_metrics_that_were_not_finite_and_their_sites() -> None:
    said: list[str] = []
    progress = RoundProgress(io.StringIO(), said.append, rounds=4)
    assert progress.faults == []
    at = "its sums are NaN, infinite or left out at "
    progress.round(line(1, not_finite={"train.f1": f"{at}c", "clients.f1": f"{at}c, d"}))
    assert said[0].endswith(f"not finite: train.f1 ({at}c) and 1 more")
    progress.round(line(2, not_finite={"clients.f1": f"{at}d"}))
    progress.round(line(3))
    assert progress.faults == [f"not finite in 2 rounds: train.f1 ({at}c), clients.f1 ({at}d)"]


def test_a_long_reason_is_cut_in_the_line_of_its_round() -> None:
    said: list[str] = []
    RoundProgress(io.StringIO(), said.append, rounds=4).round(line(1, failed=1, failures={"a": "x" * 500}))
    assert said[0].endswith(f"1 failed ({'x' * 80}...)")


def test_time_left_is_that_of_the_rounds_so_far_also_after_an_interruption() -> None:
    progress = RoundProgress(io.StringIO(), lambda _: None, rounds=30)
    assert progress.seconds_left(0.0) is None
    progress.round(line(13, version=10, real_s=40.0))  # of 13 rounds three were abandoned
    assert progress.seconds_left(40.0) == pytest.approx(20 * 4.0)


def test_on_a_terminal_one_line_lives() -> None:
    stream = Terminal()
    said: list[str] = []
    progress = RoundProgress(stream, said.append, rounds=2)
    progress.round(line(1))
    progress.__exit__()
    assert said == []
    assert "1/2" in stream.getvalue()
    assert "accuracy 0.5000  2.0 s left" in stream.getvalue()
