"""What one caller may take of the coordinator: open calls, calls a second, patience with its bytes. Pure.

Nothing here waits or reads a clock. A caller is the name in a certificate; without one, its connection when both
ends are on this machine, and otherwise its address.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from atoll.server.transport.token_bucket import Bucket

CALLS_PER_S, CALLS_BURST = 200.0, 600
"""New calls of one caller in the long run, and at once. An empty round of 25 ms costs a client two."""

CONNECTIONS_PER_CLIENT = 3
"""That of its control stream, a newer one for all other calls, and one for large downloads or the next one after that;
so many more nobody gets that has not shown its certificate yet."""

SPARE = 100
"""Connections, and calls that may be open at once, for those who never say Hello."""

STRIKES_MAX = 20
"""Refused calls of one caller, until its connections are ended: to refuse costs, too."""
STRIKES_FORGIVEN_PER_S = 0.5

MESSAGES_PER_S, MESSAGES_BURST = 50.0, 500
"""Of one client on its control stream."""

CALLERS_MAX = 20_000
"""Callers that are told apart, besides those with open calls: the oldest are forgotten."""


def connections_max(clients_max: int) -> int:
    """Connections of a port to which so many clients may be connected at once."""
    return CONNECTIONS_PER_CLIENT * clients_max + SPARE


def calls_max(clients_max: int, calls_per_client: int) -> int:
    """Calls that may be open at such a port."""
    return calls_per_client * clients_max + SPARE


@dataclass(slots=True)
class _Caller:
    open: int = 0
    calls: Bucket = field(default_factory=lambda: Bucket(CALLS_PER_S, CALLS_BURST))
    strikes: Bucket = field(default_factory=lambda: Bucket(STRIKES_FORGIVEN_PER_S, STRIKES_MAX))


class Callers:
    """Counts the calls of everybody.

    Args:
        open_max: calls that one caller may have open at once.
    """

    def __init__(self, open_max: int) -> None:
        self.open_max = open_max
        self._known: OrderedDict[str, _Caller] = OrderedDict()

    def begin(self, name: str, now: float) -> str:
        """A call begins; it must `end`, unless it is refused: then this says why, with the value and the limit."""
        caller = self._known.setdefault(name, _Caller())
        self._known.move_to_end(name)
        if caller.open >= self.open_max:
            return f"{caller.open} calls of {name} are open, allowed are {self.open_max} at once: wait for one to end"
        if not caller.calls.take(now):
            return f"{name} begins more than {CALLS_PER_S:g} calls a second ({CALLS_BURST} at once): wait a while"
        caller.open += 1
        self._forget()
        return ""

    def end(self, name: str) -> None:
        """A call has ended."""
        self._known[name].open -= 1

    def strike(self, name: str, now: float) -> bool:
        """A call was refused; True: this happens so often that the caller's connections are better ended."""
        return not self._known.setdefault(name, _Caller()).strikes.take(now)

    def _forget(self) -> None:
        """Those who were away the longest; whoever has a call open stays."""
        while len(self._known) > CALLERS_MAX:
            name, caller = self._known.popitem(last=False)
            if caller.open:
                self._known[name] = caller
                return
