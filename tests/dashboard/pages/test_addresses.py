"""Addresses of any name, and back."""

from urllib.parse import unquote, urlsplit

from hypothesis import given
from hypothesis import strategies as st

from atoll.dashboard.pages.addresses import name_in, of_run, segment


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=64))
def test_a_name_is_one_segment_and_comes_back(name: str) -> None:
    (found,) = [segment(name)]
    assert "/" not in found
    assert found not in (".", "..") or name == ".."
    assert name_in(unquote(found)) == name
    assert urlsplit(of_run(1, name, "rounds")).path == f"/runs/1/{found}/rounds"


def test_empty_values_are_in_no_query() -> None:
    assert of_run(1, "r", "rounds", state="", after=None, client="a&b") == "/runs/1/r/rounds?client=a%26b"
