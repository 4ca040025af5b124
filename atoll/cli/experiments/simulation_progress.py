"""What a person sees of a simulation: a line that lives where there is a terminal, a line now and then elsewhere.

round  12/200  ━━━━━                 accuracy 0.8731  9/10 reported, 1 straggler  virtual 26 min  3.1 min left
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column

from atoll.cli.printing import seconds

EVERY_S = 1.0
"""Where there is no terminal, rounds are told of no oftener."""

SHOWN_MAX = 80
"""Characters of a client's reason in the line of a round; `rounds.jsonl` has the rest."""


class Failures:
    """Why clients have failed: counted by the word before the colon; of each the first stands for all."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._first: dict[str, str] = {}

    def add(self, reasons: Iterable[str]) -> None:
        """Some more."""
        for reason in reasons:
            word = reason.partition(":")[0]
            self._counts[word] += 1
            self._first.setdefault(word, " ".join(reason.split()))

    @property
    def usual(self) -> tuple[int, int, str]:
        """How many there are, how many for the most frequent reason, and this reason."""
        word, most = next(iter(self._counts.most_common(1)), ("", 0))
        return self._counts.total(), most, self._first.get(word, "")


class RoundProgress:
    """Fed with one object a round, as `rounds.jsonl` has it.

    Args:
        stream: where it goes; if it is a terminal, the line lives.
        say: prints one line there otherwise.
        rounds: that the run is to commit; the version says how many it has, and the time left is as long as theirs.
    """

    def __init__(self, stream: TextIO, say: Callable[[str], None], *, rounds: int) -> None:
        self._say, self._rounds, self._committed, self._told_at = say, rounds, 0, -math.inf
        self._values: dict[str, float] = {}
        self._failures = Failures()
        self._bar = _bar(stream) if stream.isatty() else None
        if self._bar is not None:
            self._task = self._bar.add_task("", total=rounds)
            self._bar.start()

    def round(self, line: Mapping[str, Any]) -> None:
        """One round has ended."""
        self._committed = line["version"] or self._committed
        self._failures.add(line.get("failures", {}).values())
        self._values |= {name: value for name, value in _measured(line).items() if value is not None}
        text = "  ".join([*self._shown(), f"{seconds(self.seconds_left(line['real_s']))} left", *_of_round(line)])
        if self._bar is not None:
            self._bar.update(self._task, completed=self._committed, description=text)
        elif line["real_s"] - self._told_at >= EVERY_S or self._committed >= self._rounds:
            self._told_at = line["real_s"]
            self._say(f"round {self._committed}/{self._rounds}  {text}")

    def seconds_left(self, real_s: float) -> float | None:
        """Real seconds until the last commit, if the rest takes as long as what is done; None before the first."""
        left = max(0, self._rounds - self._committed)
        return real_s / self._committed * left if self._committed else None

    @property
    def failures(self) -> str:
        """How many clients have failed so far, and the most frequent reason; empty when none has."""
        count, most, reason = self._failures.usual
        if not count:
            return ""
        whom = "1 client has" if count == 1 else f"{count} times a client has"
        return f"{whom} failed; {'' if most == count else f'{most} times for '}{reason}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """The run has ended, or is interrupted."""
        if self._bar is not None:
            self._bar.stop()

    def _shown(self) -> list[str]:
        return [f"{name} {value:.4f}" for name, value in self._values.items()]


def _measured(line: Mapping[str, Any]) -> dict[str, float | None]:
    """Of the server's data; where it has none, of the clients' or of the training."""
    for group in ("server", "clients", "train"):
        if line.get(group):
            found = dict(line[group])
            return {name: value for name, value in found.items() if name != "loss"} or found
    return {}


def _of_round(line: Mapping[str, Any]) -> list[str]:
    fates = [f"{line['reported']}/{line['invited']} reported"]
    fates += [
        f"{line[name]} {name}{_because(line) if name == 'failed' else ''}"
        for name in ("stragglers", "lost", "failed", "refused")
        if line.get(name)
    ]
    why = [] if line["state"] == "committed" else [f"abandoned: {line['why']}"]
    return [f"virtual {seconds(line['virtual_s'])}", ", ".join(fates), *why]


def _because(line: Mapping[str, Any]) -> str:
    """The most frequent reason of the round's failures."""
    failures = Failures()
    failures.add(line.get("failures", {}).values())
    reason = failures.usual[2]
    return f" ({reason if len(reason) <= SHOWN_MAX else f'{reason[:SHOWN_MAX]}...'})" if reason else ""


def _bar(stream: TextIO) -> Progress:
    return Progress(
        TextColumn("round", table_column=Column(no_wrap=True)),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        BarColumn(bar_width=12),
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
        console=Console(file=stream),
        transient=True,
        expand=True,
    )
