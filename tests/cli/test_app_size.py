"""A Flower app without a number of clients says how many a round trains: its strategy would take all that are here."""

from pathlib import Path

import pytest

from atoll.operations import load as files
from atoll.operations.reporter import Reporter, reporting_to
from atoll.server.config.run import RunFile

APP = f"{Path(__file__).parents[1]}/flower/apps/own_code/pyproject.toml:app"
TEXT = f'name = "own"\ntask = "{APP}"\nrounds = 2\n[round]\ncohort_size = 2\nquorum = 1\ndeadline = 60.0\n'


@pytest.mark.parametrize(
    ("text", "overrides", "nodes", "is_told"),
    [
        (TEXT, [], None, True),
        (TEXT, ["round.cohort_size=5"], None, False),
        (TEXT, [], 4, False),
        (f'name = "own"\ntask = "{APP}"\nprogram.main = "{APP}"\n', [], None, False),
    ],
)
def test_the_size_of_a_round_is_told_where_no_number_of_clients_is_known(monkeypatch, text, overrides, nodes, is_told):
    monkeypatch.setattr(files, "run_of_app", lambda *_, **__: text)
    notes: list[str] = []
    with reporting_to(Reporter(notes.append)):
        files.load_app(APP, overrides, RunFile, nodes=nodes)
    told = "flower:tests/own-code: a round trains 2 clients, counted from the strategy's min_available_nodes; in"
    assert any(told in note for note in notes) == is_told
