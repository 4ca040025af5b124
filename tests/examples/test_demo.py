"""The output of `make demo` without a terminal."""

import io
from collections import Counter

import pytest
from rich.console import Console

from atoll.protocol.vocabulary import ClientId, Digest, Fate, Phase, RoundId, Version
from atoll.server.rounds.record import ClientRecord, RoundRecord
from examples.demo import LEGEND, Display, _Printer


class Scripted(Display):
    """A display whose records are set by the test."""

    def read(self) -> None:
        """Read nothing."""


def ended(number: int) -> RoundRecord:
    """Return a committed round, as the state directory has it."""
    north = ClientRecord(0.0, Fate.REPORTED, digest=Digest("d"), work=1.0)
    return RoundRecord(
        RoundId(number),
        Version(number - 1),
        *(0.0, 1, 1, 1),
        phase=Phase.COMMITTED,
        drawn_at=1.0,
        ended_at=3.0,
        version=Version(number),
        clients={ClientId("north"): north},
    )


@pytest.fixture
def output() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def printer(output: io.StringIO, tmp_path) -> _Printer:
    return _Printer(Scripted(tmp_path), Console(file=output, width=40))


def test_each_remark_and_each_round_is_printed_once(printer: _Printer, output: io.StringIO) -> None:
    display = printer.display
    for number in range(1, 16):  # more than the remarks that the table on a terminal keeps
        display.remark(f"something has happened, number {number}, in words that are wider than the console")
        display.records.append(ended(number))
        display.accuracy[number] = number / 100
        printer(display.render())
        printer(display.render())
    printer.finish()
    lines = output.getvalue().splitlines()
    assert [line for line, times in Counter(lines).items() if times > 1] == []
    assert [sum(f"number {number}," in line for line in lines) for number in range(1, 16)] == [1] * 15
    assert [sum(f"round {number} " in line for line in lines) for number in range(1, 16)] == [1] * 15
    assert "         round 7 committed in 2.0 s, accuracy 0.070: north" in lines
    assert lines[-1] == LEGEND
    assert len(lines) == 31


def test_the_line_of_a_round_waits_for_its_accuracy(printer: _Printer, output: io.StringIO) -> None:
    display = printer.display
    display.records += [ended(1), ended(2)]
    printer(display.render())
    assert output.getvalue() == ""
    display.accuracy[1] = 0.5
    printer(display.render())
    assert output.getvalue().splitlines() == ["         round 1 committed in 2.0 s, accuracy 0.500: north"]
    printer.finish()
    assert output.getvalue().splitlines()[1:] == ["         round 2 committed in 2.0 s: north", LEGEND]
