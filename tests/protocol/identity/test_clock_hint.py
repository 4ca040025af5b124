"""The sentences about a certificate that is not valid at this time."""

import pytest

from atoll.protocol.identity.clock_hint import Validity, out_of_time, refused_in_time, with_clock_hint

DAY = 86400.0


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("CERTIFICATE_VERIFY_FAILED: certificate is not yet valid: OK", "is not valid yet"),
        ("CERTIFICATE_VERIFY_FAILED: certificate has expired: OK", "has expired"),
        ("Tls handshake failed: SSLV3_ALERT_CERTIFICATE_EXPIRED", "has expired"),
    ],
)
def test_a_text_of_the_library_becomes_a_sentence_with_this_time(text: str, state: str) -> None:
    told = with_clock_hint(text, now=DAY)
    assert told.startswith(f"a certificate of the other machine {state}, ")
    assert "this machine's clock shows 1970-01-02 00:00:00 UTC: the clock of this machine or of the other one" in told
    assert not any(raw in told for raw in ("CERTIFICATE", "OK", "Tls"))


def test_another_failure_stays_as_it_is() -> None:
    assert with_clock_hint("connection refused") == "connection refused"


def test_a_sentence_names_both_times_of_the_certificate_and_this_one() -> None:
    sentence = out_of_time("it", Validity(0.0, DAY), 2 * DAY, "renew it")
    assert "from 1970-01-01 00:00:00 UTC to 1970-01-02 00:00:00 UTC" in sentence
    assert "shows 1970-01-03 00:00:00 UTC" in sentence
    assert sentence.endswith("if both are right, renew it")


def test_a_refusal_of_a_valid_certificate_blames_the_clock_of_the_other_machine() -> None:
    told = refused_in_time("it", Validity(0.0, 2 * DAY), DAY)
    assert "the clock of the other machine may be wrong" in told


@pytest.mark.parametrize(("now", "expected"), [(-1.0, False), (0.0, True), (DAY, True), (DAY + 1, False)])
def test_a_certificate_is_valid_from_its_first_to_its_last_second(now: float, expected: bool) -> None:
    assert Validity(0.0, DAY).includes(now) is expected
