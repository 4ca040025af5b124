"""A Flower app without a number of clients says how many a round trains: its strategy would take all that are here."""

from pathlib import Path

import pytest

from atoll.cli import files
from atoll.server.config.run import RunFile

APP = f"{Path(__file__).parents[1]}/parallel/flower/apps/own_code/pyproject.toml:app"
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
def test_the_size_of_a_round_is_told_where_no_number_of_clients_is_known(
    monkeypatch, capsys, text, overrides, nodes, is_told
):
    monkeypatch.setattr(files, "run_of_app", lambda *_, **__: text)
    files.load_app(APP, overrides, RunFile, nodes=nodes)
    told = "flower:tests/own-code: a round trains 2 clients, counted from the strategy's min_available_nodes; in"
    assert (told in " ".join(capsys.readouterr().err.split())) == is_told
