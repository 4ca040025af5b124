"""The run that an operator names."""

import pytest

from atoll.protocol.run_names import RunNotNamed, newest_named, only_named

RUNS = [("digits-1", "digits"), ("other-1", "other"), ("digits-2", "digits")]


@pytest.mark.parametrize("find", [newest_named, only_named])
def test_an_id_is_that_run(find):
    assert find("digits-1", RUNS) == "digits-1"


@pytest.mark.parametrize("find", [newest_named, only_named])
def test_an_id_comes_before_a_name(find):
    assert find("digits-1", [*RUNS, ("digits-1-1", "digits-1")]) == "digits-1"


def test_a_name_is_its_newest_run_and_for_what_cannot_be_undone_its_only_one():
    assert newest_named("digits", RUNS) == "digits-2"
    assert only_named("other", RUNS) == "other-1"
    with pytest.raises(RunNotNamed, match="2 runs have the name digits: name one of digits-1, digits-2"):
        only_named("digits", RUNS)


@pytest.mark.parametrize("find", [newest_named, only_named])
def test_an_unknown_run_is_refused_with_the_known_ones(find):
    with pytest.raises(RunNotNamed, match=r"there is no run 'digit'.*known: digits-1, other-1, digits-2"):
        find("digit", RUNS)
    with pytest.raises(RunNotNamed):
        find("digit", [])
