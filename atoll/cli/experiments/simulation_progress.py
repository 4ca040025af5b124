"""The progress of a simulation: a progress bar on a terminal, elsewhere at most one line a second.

round  12/200  ━━━━━                 accuracy 0.8731  9/10 reported, 1 straggler  virtual 26 min  3.1 min left
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TextIO

from atoll.cli.printing import seconds
from atoll.cli.waiting import Progress
from atoll.ground.printable import count_of, some_of

SHOWN_MAX = 80
"""Characters of a client's reason in the line of a round; `rounds.jsonl` has all of it."""


METRICS_MAX = 8
"""Largest number of metrics that are not finite in the closing line; the others are counted."""


REASONS = {
    "failures": ("failed", "failure", "failures"),
    "refusals": ("refused", "refusal", "refusals"),
    "losses": ("lost", "loss", "losses"),
}
"""The keys of a line under which it has reasons by client: the key of their number, and the words for one and more."""


class Failures:
    """Reasons of one kind, counted by the word before the colon; the first reason of each word is shown."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._first: dict[str, str] = {}

    def add(self, reasons: Iterable[str]) -> None:
        """Add the reasons of one round to the counts."""
        for reason in reasons:
            word = reason.partition(":")[0]
            self._counts[word] += 1
            self._first.setdefault(word, " ".join(reason.split()))

    @property
    def most_frequent(self) -> tuple[int, int, str]:
        """The number of failures, the number with the most frequent reason, and that reason."""
        word, most = next(iter(self._counts.most_common(1)), ("", 0))
        return self._counts.total(), most, self._first.get(word, "")


class NotFinite:
    """Metrics that leave out a client, or have no value, because numbers were NaN or infinite; each with the reason."""

    def __init__(self) -> None:
        self._rounds = 0
        self._reasons: dict[str, str] = {}

    def add(self, reasons: Mapping[str, str]) -> None:
        """Count a round with these reasons by metric; of a metric the newest reason is shown."""
        self._rounds += bool(reasons)
        self._reasons |= reasons

    def text(self, *, most: int) -> str:
        """Return the first `most` metrics with their reasons and the number of the others; empty: there are none."""
        return some_of((f"{name} ({reason})" for name, reason in self._reasons.items()), most)

    @property
    def summary(self) -> str:
        """The number of rounds with such metrics, and the metrics; empty: there are none."""
        text = self.text(most=METRICS_MAX)
        return f"not finite in {count_of(self._rounds, 'round')}: {text}" if text else ""


class RoundProgress(Progress):
    """The display of a run's progress, updated with each line of `rounds.jsonl`.

    Args:
        stream: the output; if it is a terminal, a progress bar is drawn on it.
        say: prints one line, where the output is not a terminal.
        rounds: the number of rounds that the run commits.
    """

    def __init__(self, stream: TextIO, say: Callable[[str], None], *, rounds: int) -> None:
        super().__init__("round", stream, say)
        self._rounds, self._committed = rounds, 0
        self._values: dict[str, float] = {}
        self._reasons, self._not_finite = {key: Failures() for key in REASONS}, NotFinite()
        self.begin(rounds)

    def round(self, line: Mapping[str, Any]) -> None:
        """Show the line of a round that has ended."""
        self._committed = line["version"] or self._committed
        for key, reasons in self._reasons.items():
            reasons.add(line.get(key, {}).values())
        self._not_finite.add(line.get("not_finite", {}))
        self._values |= {name: value for name, value in _measured(line).items() if value is not None}
        text = "  ".join([*self._shown(), f"{seconds(self.seconds_left(line['real_s']))} left", *_of_round(line)])
        is_last = self._committed >= self._rounds
        self.show(self._committed, self._rounds, text, at=line["real_s"], is_last=is_last)

    def seconds_left(self, real_s: float) -> float | None:
        """Return the real seconds until the last commit: rounds left x mean time of the committed rounds.

        None before the first commit.
        """
        left = max(0, self._rounds - self._committed)
        return real_s / self._committed * left if self._committed else None

    @property
    def faults(self) -> list[str]:
        """The lines on failed, refused and lost clients so far, and on metrics that were not finite.

        Each line has the number and the most frequent reason; a kind that did not occur has no line.
        """
        found = [self._of(key) for key in REASONS]
        return [text for text in (*found, self._not_finite.summary) if text]

    def _of(self, key: str) -> str:
        count, most, reason = self._reasons[key].most_frequent
        if not count:
            return ""
        return f"{count_of(count, *REASONS[key][1:])} of clients: {'' if most == count else f'{most} x '}{reason}"

    def _shown(self) -> list[str]:
        return [f"{name} {value:.4f}" for name, value in self._values.items()]


def _measured(line: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the metrics on the server's data or, where it has none, on the clients' or of the training."""
    for group in ("server", "clients", "train"):
        if line.get(group):
            found = dict(line[group])
            return {name: value for name, value in found.items() if name != "loss"} or found
    return {}


def _of_round(line: Mapping[str, Any]) -> list[str]:
    outcomes = [f"{line['reported']}/{line['invited']} reported"]
    outcomes += [
        f"{line[name]} {name}{_because(line, name)}"
        for name in ("stragglers", "lost", "failed", "refused")
        if line.get(name)
    ]
    not_finite = NotFinite()
    not_finite.add(line.get("not_finite", {}))
    outcomes += [f"not finite: {text}"] if (text := not_finite.text(most=1)) else []
    why = [] if line["state"] == "committed" else [f"abandoned: {line['why']}"]
    return [f"virtual {seconds(line['virtual_s'])}", ", ".join(outcomes), *why]


def _because(line: Mapping[str, Any], name: str) -> str:
    """Return the most frequent reason of the clients with outcome `name`, in brackets; empty: no reason is known."""
    failures = Failures()
    for key, (counted, _, _) in REASONS.items():
        failures.add(line.get(key, {}).values() if counted == name else ())
    reason = failures.most_frequent[2]
    return f" ({reason if len(reason) <= SHOWN_MAX else f'{reason[:SHOWN_MAX]}...'})" if reason else ""
