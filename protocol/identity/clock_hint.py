"""The hint that a clock may be wrong, for a certificate that is not valid at this time."""

import time

_SIGNS = ("not yet valid", "has expired", "certificate_expired", "certificate expired", "certificate_not_yet_valid")
"""Parts of the texts of OpenSSL and BoringSSL for a certificate outside of its time, at this end or at the other."""


def with_clock_hint(text: str, now: float | None = None) -> str:
    """Return the text of a failed handshake; one about the time of a certificate says that a clock may be wrong.

    Args:
        text: the text of the TLS library.
        now: this machine's clock [s since the epoch]; None: as it is now.
    """
    if not any(sign in text.lower() for sign in _SIGNS):
        return text
    here = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    return (
        f"{text.removesuffix(': OK')} - the clock of this machine or of the other one may be wrong (here it is {here}"
        "): compare them; if both are right, the certificate must be renewed"
    )
