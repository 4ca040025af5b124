"""The metrics of single sites: the newest version, the spread, the curves."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol.vocabulary import ClientId, RoundId, Version
from atoll.protocol.wire.mesh_use import MeshUse
from atoll.server.journal.rows import EvaluationRow
from atoll.server.journal.sources import SITE, TRAINING
from atoll.server.rounds.record import ClientRecord, RoundRecord
from atoll.server.views.sites import measurements, meshes, sites, spread
from atoll.server.views.views import is_of_round


def row(version, source, detail="", **values):
    sums = {name: (value, 1.0) for name, value in values.items()} if values else None
    return EvaluationRow("r-1", version, source, sums, int(bool(values)), detail, 0.0, values)


ROWS = [
    row(1, f"{SITE}north", accuracy=0.5, loss=1.0),
    row(1, f"{TRAINING}north", accuracy=0.1),
    row(2, f"{SITE}north", accuracy=0.75, loss=0.5),
    row(2, f"{SITE}south", accuracy=0.25, loss=1.5),
    row(2, f"{SITE}west", "its policy allows only sums over several sites"),
]


def test_the_newest_version_has_the_worst_site_by_the_direction_of_each_metric():
    found = sites(measurements(ROWS, SITE))
    assert found["version"] == 2
    assert found["sites"]["south"] == {"accuracy": 0.25, "loss": 1.5}
    assert found["metrics"]["accuracy"]["worst"] == {"site": "south", "value": 0.25}
    assert found["metrics"]["loss"]["worst"] == {"site": "south", "value": 1.5}
    assert found["metrics"]["loss"]["best"] == {"site": "north", "value": 0.5}
    assert found["not_shown"] == {"west": "its policy allows only sums over several sites"}


def test_a_site_has_a_curve_of_its_own_by_evaluation_and_by_training():
    assert sites(measurements(ROWS, SITE))["curves"]["north"]["accuracy"] == [(1, 0.5), (2, 0.75)]
    assert sites(measurements(ROWS, TRAINING))["curves"] == {"north": {"accuracy": [(1, 0.1)]}}
    assert sites([]) == {"version": None, "sites": {}, "metrics": {}, "not_shown": {}, "curves": {}}


def test_a_site_s_mesh_is_that_of_its_newest_training():
    def record(number, **uses):
        clients = {ClientId(name): ClientRecord(0.0, mesh=use) for name, use in uses.items()}
        return RoundRecord(RoundId(number), Version(number - 1), 0.0, 1, 1, 1, clients=clients)

    use = MeshUse(num_ranks=4, peak_bytes=5)
    larger = replace(use, peak_bytes=9)
    found = meshes([record(1, north=use, south=use), record(2, north=larger), record(3, south=None)])
    assert {site: (one["round"], one["peak_bytes"], one["mfu"]) for site, one in found.items()} == {
        "north": (2, 9, None),
        "south": (1, 5, None),
    }


@given(st.dictionaries(st.text(min_size=1), st.floats(-1e6, 1e6), min_size=1))
def test_the_spread_is_numpys(values):
    found = spread("accuracy", values)
    assert np.isclose(found["mean"], np.mean(list(values.values())))
    assert np.isclose(found["deviation"], np.std(list(values.values())), atol=1e-6)
    assert found["worst"]["value"] == min(values.values())
    assert spread("loss", values)["worst"]["value"] == max(values.values())


@pytest.mark.parametrize(
    ("values", "mean", "deviation"),
    [((1e308, 1e308), 1e308, 0.0), ((1.5e308, -1.5e308), 0.0, 1.5e308), ((1e200, 0.0), 5e199, 5e199)],
)
def test_sites_that_send_the_largest_numbers_have_a_spread(
    values: tuple[float, ...], mean: float, deviation: float
) -> None:
    found = spread("accuracy", dict(zip("ab", values, strict=True)))
    assert (found["mean"], found["deviation"]) == (pytest.approx(mean), pytest.approx(deviation))


def test_the_training_of_a_repeated_round_is_not_shown_for_the_abandoned_one():
    """Both began from version 2, and the row of a site is that of its newest training from there."""
    abandoned, repeated = (
        RoundRecord(RoundId(number), Version(2), at, 1, 1, 1, clients={ClientId("north"): ClientRecord(at, fate_at=at)})
        for number, at in ((3, 10.0), (4, 20.0))
    )
    newest = replace(row(2, f"{TRAINING}north", accuracy=0.5), at=20.0)
    assert [is_of_round(newest, record) for record in (abandoned, repeated)] == [False, True]
    assert not is_of_round(replace(newest, source=f"{TRAINING}south"), repeated)
