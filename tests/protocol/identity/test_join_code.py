import contextlib
import random
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol.identity.join_code import JoinCode, JoinCodeError, is_address

CODE = JoinCode(("atoll.example.org:7072", "[2001:db8::1]:443"), bytes(range(32)), b"12345678", bytes(range(16)))

HOSTS = st.sampled_from(["localhost", "127.0.0.1", "a.b-c.example", "[::1]", "x" * 63])
ADDRESSES = st.builds(lambda host, port: f"{host}:{port}", HOSTS, st.integers(1, 65535))


def of(length: int) -> st.SearchStrategy[bytes]:
    return st.binary(min_size=length, max_size=length)


@given(st.lists(ADDRESSES, min_size=1, max_size=4).map(tuple), of(32), of(8), of(16))
def test_a_code_is_read_back_as_it_was(
    addresses: tuple[str, ...], fingerprint: bytes, id: bytes, secret: bytes
) -> None:
    code = JoinCode(addresses, fingerprint, id, secret)
    assert JoinCode.parse(str(code)) == code


def test_what_means_nothing_may_be_in_it() -> None:
    text = str(CODE)
    broken = "\n".join(text[start : start + 30] for start in range(0, len(text), 30))
    assert JoinCode.parse(f"  {broken.lower()}\r\n") == CODE
    assert JoinCode.parse("-".join(text)) == CODE


def test_every_wrong_letter_and_every_two_that_are_exchanged_are_noticed() -> None:
    text, letters = str(CODE), string.ascii_uppercase + "234567"
    rng = random.Random(1)
    for place in range(len("atoll-"), len(text)):
        wrong = rng.choice(letters.replace(text[place], ""))
        with pytest.raises(JoinCodeError):
            JoinCode.parse(text[:place] + wrong + text[place + 1 :])
        with pytest.raises(JoinCodeError):
            JoinCode.parse(text[:place])
        if place + 1 < len(text) and text[place] != text[place + 1]:
            with pytest.raises(JoinCodeError):
                JoinCode.parse(text[:place] + text[place + 1] + text[place] + text[place + 2 :])


@given(st.text(max_size=300) | st.text(alphabet=string.ascii_uppercase + "234567", max_size=300).map("atoll-".__add__))
def test_any_text_is_a_code_or_a_documented_error(text: str) -> None:
    with contextlib.suppress(JoinCodeError):
        assert JoinCode.parse(str(JoinCode.parse(text)))


@pytest.mark.parametrize(
    "text", ["", "atoll-", "atoll", "ATOLL-A", "x" * 5000, "atoll-" + "A" * 8, "atoll-ÄÄÄÄ", "ıTOLL-"]
)
def test_what_is_no_code_is_refused(text: str) -> None:
    with pytest.raises(JoinCodeError):
        JoinCode.parse(text)


def test_neither_its_printed_form_in_a_log_nor_a_refusal_tells_the_secret() -> None:
    assert "secret" not in repr(CODE)
    text = str(CODE)
    with pytest.raises(JoinCodeError) as refusal:
        JoinCode.parse(text[:-3])
    assert text[6:30] not in str(refusal.value)


@pytest.mark.parametrize("address", ["a:1", "127.0.0.1:65535", "[::1]:7070", "a_b.c:80"])
def test_addresses(address: str) -> None:
    assert is_address(address)


NO_ADDRESSES = """|a|:1|a:0|a:65536|a:01|::1:80|[::1%lo]:80|a b:1|a,b:1|-a:1|[1]:1|dns:///x:1|a:1\n"""


@pytest.mark.parametrize("address", NO_ADDRESSES.split("|"))
def test_what_is_no_address(address: str) -> None:
    assert not is_address(address)


def test_parts_of_another_form_are_refused() -> None:
    with pytest.raises(JoinCodeError, match="allowed: 1 to 4"):
        JoinCode((), bytes(32), bytes(8), bytes(16))
    with pytest.raises(JoinCodeError, match="allowed: host:port"):
        JoinCode(("unix:/x",), bytes(32), bytes(8), bytes(16))
    with pytest.raises(JoinCodeError, match="32, 8 and 16"):
        JoinCode(("a:1",), bytes(31), bytes(8), bytes(16))
