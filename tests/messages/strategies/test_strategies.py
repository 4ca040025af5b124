"""All strategies of Flower over our grid, hosted, give what Flower's own loop gives."""

import pytest

from tests.messages.strategies import hosted_here
from tests.messages.strategies.processes import by_processes
from tests.messages.strategies.table import SITES, by_flower, opened, row


def is_quick(name):
    return "legacy" not in name and "workflow" not in name  # their thread of nodes ends after five seconds


def faults(rows):
    return [str(one) for one in rows if not one.is_right]


def test_all_strategies_of_today_are_equal_to_the_bit(tmp_path):
    from flwr.serverapp import strategy

    with opened() as (app, cases):
        chosen = [name for name in cases if is_quick(name)]
        assert {*strategy.__all__} - {"Strategy", "Result"} <= {*chosen}
        compare(app, chosen, tmp_path)


@pytest.mark.long
def test_strategies_of_before_and_secure_aggregation_are_equal(tmp_path):
    with opened() as (app, cases):
        compare(app, [name for name in cases if not is_quick(name)], tmp_path)


def compare(app, names, folder):
    options = {"cases": ",".join(names)}
    by_flower(app, folder / "flower", options)
    hosted = folder / "hosted"
    from tests.messages.strategies.table import within

    with within(hosted):
        hosted_here.run(app, SITES, folder / "run", options)
    assert faults(row(name, hosted, folder / "flower") for name in names) == []


@pytest.mark.long
@pytest.mark.real
@pytest.mark.timeout(1500)
def test_all_cases_by_a_coordinator_and_seven_agents(tmp_path):
    """As `make flower-table`."""
    with opened() as (app, cases):
        options = {"cases": ",".join(cases)}
        hosted = by_processes(tmp_path, options)
        by_flower(app, tmp_path / "flower", options)
        assert faults(row(name, hosted, tmp_path / "flower", has_secret=True) for name in cases) == []
