"""Refusals keep their faults apart, whatever the sentences have in them."""

import copy
import pickle

import pytest

from atoll.ground.faults import Refused, faults_in
from atoll.task.errors import TaskBroken
from atoll.task.overrides import OverridesRefused

TWO = ("lr: got 0; allowed: above 0", "batch_size: got -1; allowed: 1 or more")


@pytest.mark.parametrize("kind", [Refused, TaskBroken, OverridesRefused])
def test_a_refusal_keeps_its_faults_apart_and_shows_them_on_one_line(kind: type[Refused]) -> None:
    """Each sentence has a semicolon: a message cannot be divided at them."""
    for error in (kind(*TWO), copy.copy(kind(*TWO)), pickle.loads(pickle.dumps(kind(*TWO)))):
        assert faults_in(error) == error.faults == TWO
        assert str(error) == "lr: got 0; allowed: above 0; batch_size: got -1; allowed: 1 or more"
        assert isinstance(error, ValueError)


def test_another_error_is_one_fault_also_with_a_semicolon() -> None:
    assert faults_in(ValueError(TWO[0])) == (TWO[0],)
    assert faults_in(KeyError("a")) == ("'a'",)
