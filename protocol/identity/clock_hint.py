"""The sentences about a certificate that is not valid at this time: one of two clocks may be wrong.

Pure, but for the clock that is read when no time is given.
"""

import time
from typing import NamedTuple

SKEW_S = 300.0
"""Largest difference between the clocks of two machines that sign and check messages [s]."""

_EARLY = "not yet valid", "certificate_not_yet_valid"
_LATE = "has expired", "certificate_expired", "certificate expired"
"""Parts of the texts of OpenSSL and BoringSSL for a certificate outside of its time."""


class Validity(NamedTuple):
    """The time in which a certificate is valid, both ends included [s since the epoch]."""

    begin: float
    end: float

    def includes(self, now: float) -> bool:
        """Return whether the certificate is valid at `now` [s since the epoch]."""
        return self.begin <= now <= self.end

    def __str__(self) -> str:
        return f"from {instant(self.begin)} to {instant(self.end)}"


def instant(at: float) -> str:
    """Return an instant [s since the epoch] for a comparison between machines: in UTC, with seconds."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))


def out_of_time(what: str, validity: Validity, now: float, remedy: str) -> str:
    """Return the sentence about a certificate that this machine's clock takes for not valid.

    Args:
        what: names the certificate and its owner.
        validity: of the certificate.
        now: this machine's clock [s since the epoch].
        remedy: for the case that both clocks are right.
    """
    return f"{what} is valid {validity}, {_clocks(now)}, {remedy}"


def refused_in_time(what: str, validity: Validity, now: float) -> str:
    """Return the sentence about this machine's certificate that is valid by its own clock, and is refused."""
    return (
        f"the server ends the connection when it has seen {what}, which is valid {validity}: this machine's clock "
        f"shows {instant(now)}, and the clock of the other machine may be wrong; compare them (NTP); if both are "
        "right, it does not trust the authority of that certificate"
    )


def with_clock_hint(text: str, now: float | None = None) -> str:
    """Return the text of a failed handshake; one about the time of a certificate becomes a sentence about clocks.

    Args:
        text: the text of the TLS library.
        now: this machine's clock [s since the epoch]; None: as it is now.
    """
    said = text.lower()
    early, late = (any(sign in said for sign in signs) for signs in (_EARLY, _LATE))
    if not (early or late):
        return text
    state = "is not valid yet" if early else "has expired"
    clocks = _clocks(time.time() if now is None else now)
    return f"a certificate of the other machine {state}, {clocks}, the certificate must be renewed"


def _clocks(now: float) -> str:
    return (
        f"and this machine's clock shows {instant(now)}: the clock of this machine or of the other one may be wrong; "
        "compare them (NTP); if both are right"
    )
