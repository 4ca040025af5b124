"""The coordinator's attacks over all rounds of a run: means of what it inferred, and numbers of its lies."""

from collections import Counter
from collections.abc import Mapping
from typing import Any


class AttackTally:
    """Sum of the rounds' results, as their lines have them."""

    def __init__(self) -> None:
        self._sums: Counter[str] = Counter()
        self._num_clients = 0
        self._told: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()

    def add(self, found: Mapping[str, Any]) -> None:
        """Add the result of a round; empty: the coordinator did not attack in it."""
        if (clients := found.get("clients", 0)) > 0:
            self._num_clients += clients
            for name, value in found.items():
                if name != "clients":
                    self._sums[name] += value * clients
        for lie in found.get("lies", ()):
            self._told[lie["move"]] += 1
            self._refused[lie["move"]] += bool(lie["refused"])

    @property
    def result(self) -> dict[str, Any]:
        """The part of a run's result: means over rounds, weighted by clients, or the lies by move."""
        if self._num_clients:
            means = {name: total / self._num_clients for name, total in self._sums.items()}
            return {"clients": self._num_clients} | means
        if not self._told:
            return {}
        moves = {move: {"told": self._told[move], "refused": self._refused[move]} for move in sorted(self._told)}
        return {"told": self._told.total(), "refused": self._refused.total(), "moves": moves}
