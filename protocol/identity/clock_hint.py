"""The messages about a certificate that is not valid now: one of two clocks may be wrong.

Pure, except that the clock is read when no time is given.
"""

import time
from typing import NamedTuple

SKEW_S = 300.0
"""Largest difference between the clocks of two machines that sign and check messages [s]."""

_EARLY = "not yet valid", "certificate_not_yet_valid"
_LATE = "has expired", "certificate_expired", "certificate expired"
"""Parts of the messages of OpenSSL and BoringSSL about a certificate outside of its validity."""


class Validity(NamedTuple):
    """Period in which a certificate is valid, both ends included [s since the epoch]."""

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
    """Return the message about a certificate that is not valid by this machine's clock.

    Args:
        what: names the certificate and its owner.
        validity: the validity of the certificate.
        now: this machine's clock [s since the epoch].
        remedy: what to do if both clocks are right.
    """
    return f"{what} is valid {validity}, {_clocks(now)}, {remedy}"


def refused_in_time(what: str, validity: Validity, now: float) -> str:
    """Return the message about this machine's certificate that is valid by the local clock, but refused."""
    return (
        f"the server ends the connection when it has seen {what}, which is valid {validity}: this machine's clock "
        f"shows {instant(now)}, and the clock of the other machine may be wrong; compare them (NTP); if both are "
        "right, it does not trust the authority of that certificate"
    )


def with_clock_hint(text: str, now: float | None = None) -> str:
    """Return the message of a failed handshake; one about a certificate's time is replaced by advice about clocks.

    Args:
        text: the message of the TLS library.
        now: this machine's clock [s since the epoch]; None: the present time.
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
