"""The gathering of parts: one decision, when every part is durable and all together were found to cover the model."""

from hypothesis import given
from hypothesis import strategies as st

from atoll.server.parts.gathering import Gathering, newest_first


@given(st.integers(1, 5), st.lists(st.tuples(st.sampled_from(["begin", "keep", "end"]), st.integers(0, 4))))
def test_an_update_is_whole_only_with_every_part_kept_and_judged(num_parts: int, steps: list[tuple[str, int]]) -> None:
    gathering: Gathering[str] = Gathering(num_parts, set())
    kept: set[int] = set()
    coming: set[int] = set()
    for what, index in steps:
        index %= num_parts
        match what:
            case "begin":
                assert gathering.begin(index) == (index not in kept)
                coming.add(index)
            case "keep":
                gathering.keep(index)
                kept.add(index)
            case "end":
                gathering.end(index)
                coming.discard(index)
        assert gathering.must_be_covered == (kept | coming == set(range(num_parts)))
        assert not gathering.is_whole
    gathering.covers = True
    assert gathering.is_whole == (kept == set(range(num_parts)))
    assert not gathering.must_be_covered


@given(st.lists(st.sampled_from("abcd")), st.integers(1, 3))
def test_the_newest_partial_uploads_stay_however_often_they_go_on(begun: list[str], most: int) -> None:
    partial: list[str] = []
    for digest in begun:
        before = partial
        partial, gone = newest_first(partial, digest, most)
        assert partial[0] == digest
        assert set(partial) | set(gone) == {*before, digest}
        assert len(partial) <= most
        assert not gone or len(partial) == most
        assert digest not in gone
