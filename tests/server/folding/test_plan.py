"""The plan of a fold: the coordinator computes once what each rank would find by itself.

Synchronous rounds weigh, asynchronous ones scale.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from atoll.aggregation.fold.means import Weighted, totals_of
from atoll.aggregation.fold.streaming import fold
from atoll.protocol.manifest import UpdateManifest, VersionManifest
from atoll.protocol.vocabulary import ClientId, Digest, RoundId, RunId, Version
from atoll.server.config.aggregation import AggregationConfig, OptimizerConfig
from atoll.server.files.run_store import RunStore
from atoll.server.folding.method import Method
from atoll.server.folding.plan import FoldPlan, Private, plan_of, weights_and_factors
from atoll.server.folding.reducer import step_of
from atoll.server.journal.codec import StoredUpdateMeta
from atoll.server.rounds.events import Aggregate, Contribution
from atoll.server.rounds.policy import Mode
from atoll.tensors import safetensors_file
from tests.aggregation.models import store

MAGNITUDES = {"a": 1e-3, "b": 1.0, "c": 1e30}
WEIGHTS = {"a": 0.1, "b": 1000, "c": 3e-25}
NORMALIZERS = {"a": 2.0, "b": 1e9, "c": 40.0}


@dataclass
class Planning:
    """A plan and its updates."""

    plan: FoldPlan
    base: VersionManifest
    updates: list[Weighted]
    method: Method


def planned(
    folder: Path,
    optimizer: OptimizerConfig = OptimizerConfig(),  # noqa: B008 - a value
    *,
    mode: Mode = "sync",
    scales: Mapping[str, float] = MappingProxyType({}),
    private: Private | None = None,
    **aggregation: Any,
) -> Planning:
    """Three updates of a model with a trained tensor, its variate, a buffer and a counter; "b" has no buffer."""
    rng = np.random.default_rng(3)
    settings = (AggregationConfig(**aggregation), optimizer)
    method = Method.of(*settings)

    def arrays(scale: float) -> dict[str, Any]:
        floats = {name: (scale * rng.standard_normal(20)).astype(np.float32) for name in ("w", "control/w", "mean")}
        return floats | {"count": np.array(1 << 60)}

    base = VersionManifest.of(safetensors_file.write(folder / "base", arrays(1.0)))
    stored, metas, contributions = {}, {}, []
    for client, scale in MAGNITUDES.items():
        update = {name: array for name, array in arrays(scale).items() if (client, name) != ("b", "mean")}
        stored[client] = store(folder / client, update)
        manifest = UpdateManifest(
            run_id=RunId("run-1"),
            round_id=RoundId(1),
            client_id=ClientId(client),
            base_version=Version(0),
            base_digest=Digest("0" * 64),
            num_examples=WEIGHTS[client],
            work=1.0,
            pieces=stored[client].pieces,
            normalizer=NORMALIZERS[client],
            effective_steps=NORMALIZERS[client],
        )
        squares = {name: float(np.sum(array.astype(np.float64) ** 2)) for name, array in update.items()}
        metas[manifest.digest] = StoredUpdateMeta(manifest.encode(), stored[client].magnitudes, squares, rank=1)
        contributions.append(Contribution(ClientId(client), manifest.digest, WEIGHTS[client], scales.get(client, 1.0)))
    plan = plan_of(
        Aggregate(RoundId(1), Version(0), tuple(contributions), mode),
        base,
        metas,
        method=method,
        digest_of_version=lambda _: Digest("0" * 64),
        buffers=frozenset({"mean"}),
        settings=settings,
        private=private,
    )
    updates = [
        Weighted(stored[client], item.weight, item.factor, item.trained_factor)
        for client, item in zip(MAGNITUDES, plan.updates, strict=True)
    ]
    return Planning(plan, base, updates, method)


CASES: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "norm bound": {"norm_bound": "median"},
    "tiny norm bound": {"norm_bound": 1e-300},
    "fednova": {"algorithm": "fednova"},
    "scaffold": {"algorithm": "scaffold", "num_clients": 7},
}


@pytest.mark.parametrize("case", CASES)
def test_totals_of_the_plan_are_those_of_the_fold(tmp_path: Path, case: str) -> None:
    it = planned(tmp_path, **CASES[case])
    trained = it.plan.trained(it.base.layout)
    assert trained & {"w", "control/w", "mean"} == {"w"}
    assert it.plan.totals == totals_of(it.base.layout, ((u, u.carried) for u in it.updates), trained)
    assert it.plan.totals["mean"].count == 2
    assert it.plan.totals["count"].magnitude == 1 << 60, "integers are not scaled"
    assert FoldPlan.decode(it.plan.encode()) == it.plan


def test_the_plan_names_every_rank_that_has_parts_of_an_update(tmp_path: Path) -> None:
    it = planned(tmp_path)
    assert [[update.lies_at(rank) for rank in range(3)] for update in it.plan.updates] == [[False, True, False]] * 3
    spread = replace(it.plan.updates[0], ranks=(0, 2))
    assert [spread.lies_at(rank) for rank in range(3)] == [True, False, True]
    plan = replace(it.plan, updates=(spread, *it.plan.updates[1:]))
    assert FoldPlan.decode(plan.encode()) == plan


@pytest.mark.parametrize("case", CASES)
def test_every_plan_can_be_folded(tmp_path: Path, case: str) -> None:
    it = planned(tmp_path, **CASES[case])
    step = step_of(it.plan, it.base.layout, it.method, RunStore(tmp_path))
    fold(tmp_path / "base", it.updates, tmp_path / "new", step=step)
    assert np.isfinite(safetensors_file.read(tmp_path / "new")["w"]).all()


def test_a_grid_is_sized_by_what_is_added(tmp_path: Path) -> None:
    """ "c" is 1e30 long and clipped to the median: it does not make the grid coarse for the others."""
    totals = planned(tmp_path, norm_bound="median").plan.totals
    assert max(totals[name].magnitude for name in ("w", "control/w", "mean")) < 10.0
    nova = planned(tmp_path, algorithm="fednova").plan
    scaled = [item.trained_factor * MAGNITUDES[client] for client, item in zip(MAGNITUDES, nova.updates, strict=True)]
    assert 0.1 * max(scaled) < nova.totals["w"].magnitude < 10 * max(scaled)
    assert nova.totals["mean"].magnitude > 1e29, "a buffer is not normalized"


def test_a_rank_builds_the_step_from_the_plan_alone(tmp_path: Path) -> None:
    it = planned(tmp_path, OptimizerConfig(name="fedadam"), algorithm="scaffold", num_clients=7)
    plan = FoldPlan.decode(it.plan.encode())
    step = step_of(plan, it.base.layout, Method.of(plan.aggregation, plan.optimizer), RunStore(tmp_path))
    assert step.num_clients == 7
    assert [tensor.name for tensor in it.base.layout if step.is_trained(tensor)] == ["w"]
    assert [tensor.name for tensor in it.base.layout if step.is_control(tensor)] == ["control/w"]
    assert not step.before
    assert step.after.keys() == {"first_moment", "second_moment"}


METHOD = Method.of(AggregationConfig(), OptimizerConfig())


def aggregate(mode: Mode, *rows: tuple[int, float]) -> Aggregate:
    contributions = tuple(
        Contribution(ClientId(f"c{k}"), Digest(f"d{k}"), num_examples, scale, Version(0))
        for k, (num_examples, scale) in enumerate(rows)
    )
    return Aggregate(RoundId(1), Version(0), contributions, mode)


def mean(weights: object, factors: object, updates: list[float]) -> float:
    """Compute the mean by the formula of the fold."""
    terms = list(zip(weights, factors, updates, strict=True))  # type: ignore[call-overload]
    return sum(w * f * u for w, f, u in terms) / sum(w for w, _, _ in terms)


def test_a_synchronous_round_discounts_numerator_and_denominator() -> None:
    weights, factors = weights_and_factors(aggregate("sync", (10, 1.0), (10, 0.5)), METHOD, [1.0, 1.0])
    assert (weights, factors) == ((10, 5), [1.0, 1.0])
    assert mean(weights, factors, [3.0, 6.0]) == pytest.approx((3 + 0.5 * 6) / 1.5)


def test_fedbuff_divides_by_the_number_of_updates() -> None:
    weights, factors = weights_and_factors(aggregate("fedbuff", (1000, 1.0), (1, 0.5)), METHOD, [1.0, 1.0])
    assert mean(weights, factors, [3.0, 6.0]) == (3 + 0.5 * 6) / 2


def test_fedasync_takes_its_share_of_the_one_update() -> None:
    weights, factors = weights_and_factors(aggregate("fedasync", (1000, 0.3)), METHOD, [1.0])
    assert mean(weights, factors, [10.0]) == pytest.approx(3.0)


def test_the_norm_bound_holds_for_what_is_scaled() -> None:
    _, factors = weights_and_factors(aggregate("fedbuff", (1, 0.5), (1, 1.0)), METHOD, [0.5, 1.0])
    assert factors == [0.25, 1.0]


def test_fedbuff_s_discounts_size_the_grid(tmp_path: Path) -> None:
    contributions = [("a", 1.0), ("b", 1.0), ("c", 1e-25)]
    plain, buffered = (planned(tmp_path, mode=mode, scales=dict(contributions)) for mode in ("sync", "fedbuff"))
    assert plain.plan.totals["w"].magnitude > 1e29
    assert buffered.plan.totals["w"].magnitude < 1e6
    assert buffered.plan.totals["w"].weight == 3
