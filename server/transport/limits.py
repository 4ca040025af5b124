"""The limits of one caller: open calls, calls per second, strikes. Pure.

Nothing here waits or reads a clock. A caller is the name in a certificate; without one, its connection if both ends are
on this machine, and otherwise its address.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from atoll.ground.printable import count_of
from atoll.server.transport.token_bucket import Bucket

CALLS_PER_S, CALLS_BURST = 200.0, 600
"""New calls of one caller: rate [1/s] and burst. An empty round of 25 ms takes two calls of a client."""

CONNECTIONS_PER_CLIENT = 3
"""Number of connections of one client: the control stream, a newer one for all other calls, and one for large downloads
or the next rotation. A caller without a certificate gets no more than this."""

SPARE = 100
"""Connections, and open calls, for callers that never send Hello."""

STRIKES_MAX = 20
"""Number of refused calls of one caller until its connections are ended: a refusal costs time, too."""
STRIKES_FORGIVEN_PER_S = 0.5

MESSAGES_PER_S, MESSAGES_BURST = 50.0, 500
"""Messages of one client on its control stream: rate [1/s] and burst."""

CALLERS_MAX = 20_000
"""Number of callers counted individually, besides those with open calls; the oldest are forgotten."""


def connections_max(clients_max: int) -> int:
    """Return the limit of connections to a port for `clients_max` clients."""
    return CONNECTIONS_PER_CLIENT * clients_max + SPARE


def calls_max(clients_max: int, calls_per_client: int) -> int:
    """Return the limit of open calls at a port for `clients_max` clients."""
    return calls_per_client * clients_max + SPARE


@dataclass(slots=True)
class _Caller:
    open: int = 0
    calls: Bucket = field(default_factory=lambda: Bucket(CALLS_PER_S, CALLS_BURST))
    strikes: Bucket = field(default_factory=lambda: Bucket(STRIKES_FORGIVEN_PER_S, STRIKES_MAX))


class Callers:
    """Counted calls of all callers.

    Args:
        open_max: the calls that one caller may have open at once.
    """

    def __init__(self, open_max: int) -> None:
        self.open_max = open_max
        self._known: OrderedDict[str, _Caller] = OrderedDict()

    def begin(self, name: str, now: float) -> str:
        """Count the begin of a call; return "", or the reason for refusing it, with the value and the limit.

        A call that is not refused must be ended with `end`.
        """
        caller = self._known.setdefault(name, _Caller())
        self._known.move_to_end(name)
        if caller.open >= self.open_max:
            return (
                f"{name} has {count_of(caller.open, 'open call')}; allowed: {self.open_max} "
                "at once, wait for one to end"
            )
        if not caller.calls.take(now):
            return f"{name} begins more than {CALLS_PER_S:g} calls a second ({CALLS_BURST} at once): wait a while"
        caller.open += 1
        self._forget()
        return ""

    def end(self, name: str) -> None:
        """Count the end of a call."""
        self._known[name].open -= 1

    def strike(self, name: str, now: float) -> bool:
        """Count a refused call; return True if the caller has reached the limit and its connections should be ended."""
        return not self._known.setdefault(name, _Caller()).strikes.take(now)

    def _forget(self) -> None:
        """Forget the callers that were away the longest, except those with open calls."""
        while len(self._known) > CALLERS_MAX:
            name, caller = self._known.popitem(last=False)
            if caller.open:
                self._known[name] = caller
                return
