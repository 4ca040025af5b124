"""The hint that a clock may be wrong."""

import pytest

from atoll.protocol.identity.clock_hint import with_clock_hint


@pytest.mark.parametrize(
    "text",
    [
        "verification check failed: certificate is not yet valid: OK",
        "certificate has expired: OK",
        "Tls handshake failed: SSLV3_ALERT_CERTIFICATE_EXPIRED",
    ],
)
def test_a_certificate_outside_of_its_time_names_both_clocks_and_this_one_s_time(text: str) -> None:
    told = with_clock_hint(text, now=86400.0)
    assert told.startswith(text.removesuffix(": OK"))
    assert "the clock of this machine or of the other one may be wrong (here it is 1970-01-02 00:00:00 UTC)" in told


def test_another_failure_stays_as_it_is() -> None:
    assert with_clock_hint("connection refused") == "connection refused"
