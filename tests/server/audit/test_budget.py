"""The budget of lines that one caller may cause."""

from atoll.server.audit import budget
from atoll.server.audit.budget import BURST, KEYS_MAX, OTHERS, REFILL_S, Budget


def test_a_few_are_written_and_the_rest_is_counted_once():
    it = Budget()
    assert [it.allows("mallory", 0.0) for _ in range(100)] == [True] * BURST + [False] * (100 - BURST)
    assert it.allows("ada", 0.0)
    assert it.withheld() == {"mallory": 100 - BURST}
    assert it.withheld() == {}


def test_the_allowance_comes_back_with_time():
    it = Budget()
    for _ in range(BURST):
        assert it.allows("mallory", 0.0)
    assert not it.allows("mallory", REFILL_S - 1)
    assert it.allows("mallory", REFILL_S + 1)
    assert not it.allows("mallory", REFILL_S + 1)
    assert sum(it.allows("mallory", 1e6) for _ in range(100)) == BURST, "no more than that is ever saved up"


def test_a_clock_that_runs_backward_gives_nothing_away():
    it = Budget()
    assert sum(it.allows("mallory", 1000.0 - n) for n in range(100)) == BURST


def test_many_names_are_counted_together_and_cost_no_memory():
    it = Budget()
    allowed = sum(it.allows(f"name-{n}", 0.0) for n in range(5 * KEYS_MAX))
    assert allowed <= budget.ALL_BURST
    assert len(it._of) <= KEYS_MAX + 1
    assert it.withheld()[OTHERS] >= 3 * KEYS_MAX


def test_quiet_callers_make_room():
    it = Budget()
    for n in range(KEYS_MAX):
        it.allows(f"name-{n}", 0.0)
    assert it.allows("ada", BURST * REFILL_S + 1)
    assert "ada" in it._of
