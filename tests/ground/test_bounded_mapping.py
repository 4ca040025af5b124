"""A mapping that forgets what was used longest ago, against a list that does the same slowly."""

from hypothesis import given
from hypothesis import strategies as st

from atoll.ground.bounded_mapping import BoundedMapping

OPERATIONS = st.lists(st.tuples(st.sampled_from(["read", "write", "delete"]), st.integers(0, 6)), max_size=60)


@given(st.integers(1, 5), OPERATIONS)
def test_the_newest_entries_are_kept_in_the_order_of_their_use(
    size_max: int, operations: list[tuple[str, int]]
) -> None:
    mapping, newest_last = BoundedMapping[int, int](size_max), list[int]()
    for number, (what, key) in enumerate(operations):
        is_there = key in newest_last
        if is_there:
            newest_last.remove(key)
        if what == "write":
            mapping[key] = number
        elif what == "read":
            assert (mapping.get(key) is not None) == is_there
        elif is_there:
            del mapping[key]
        if what == "write" or (what == "read" and is_there):
            newest_last = [*newest_last, key][-size_max:]
        assert list(mapping) == newest_last
        assert len(mapping) == len(newest_last)


def test_a_mapping_is_read_whole_from_the_oldest_entry_to_the_newest() -> None:
    mapping = BoundedMapping[int, str](2)
    mapping.update({1: "a", 2: "b", 3: "c"})
    assert list(mapping.items()) == [(2, "b"), (3, "c")]
    assert list(mapping.values()) == ["b", "c"]
    assert mapping == {2: "b", 3: "c"}
    assert list(mapping) == [2, 3]
