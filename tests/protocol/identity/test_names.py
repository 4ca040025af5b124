import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol.identity.names import Identity, Role, is_name


@given(st.sampled_from(Role), st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z"))
def test_an_identity_is_read_back_from_its_uri(role: Role, name: str) -> None:
    identity = Identity(role, name)
    assert Identity.parse(identity.uri) == identity


@pytest.mark.parametrize("name", ["", ".north", "-x", "nørth", "a/b", "a b", "a\n", "x" * 65])
def test_a_name_of_another_form_is_refused_and_named(name: str) -> None:
    assert not is_name(name)
    with pytest.raises(ValueError, match="allowed are 1 to 64 letters"):
        Identity(Role.CLIENT, name)


@pytest.mark.parametrize("uri", ["", "atoll://", "atoll://client", "atoll://king/north", "https://client/north"])
def test_a_uri_of_another_form_names_nobody(uri: str) -> None:
    with pytest.raises(ValueError, match="is not an identity"):
        Identity.parse(uri)


@given(st.text(max_size=200))
def test_any_text_is_an_identity_or_a_value_error(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert Identity.parse(text).uri == text
