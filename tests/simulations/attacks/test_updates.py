from collections.abc import Iterator, Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from atoll.simulations.attacks.adversary import Adversary
from atoll.simulations.attacks.config import AttackConfig
from atoll.simulations.attacks.updates import little_is_enough_z, moments
from atoll.task.arrays import Arrays
from tests.later import later

stats = later("scipy.stats")

HONEST = {
    "a": {"w": np.array([1.0, 2.0], np.float32), "n": np.array(3)},
    "b": {"w": np.array([3.0, -2.0], np.float32), "n": np.array(5)},
    "c": {"w": np.array([5.0, 3.0], np.float32), "n": np.array(7)},
}
VERSION = {"w": np.array([0.5, 0.5], np.float32), "n": np.array(1)}


def attacked(
    kind: str, malicious: str = "a", *, previous: Arrays | None = None, **options: object
) -> dict[str, Arrays]:
    config = AttackConfig.model_validate({"kind": kind, **options})
    return Adversary(config, frozenset(malicious), seed=1).updates(4, HONEST, VERSION, previous)


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("sign_flip", {}, [-1, -2]),
        ("scaled_flip", {}, [-10, -20]),
        ("scaled_flip", {"factor": 2.5}, [-2.5, -5]),
        ("backdoor", {}, [3, 6]),  # three clients, one malicious: the mean of three becomes its model
        ("backdoor", {"factor": 2.0}, [2, 4]),
        ("ipm", {}, [-8, -1]),  # the honest mean is (4, 0.5)
        ("ipm", {"epsilon": 0.5}, [-2, -0.25]),
        ("ipm", {"knows": "own"}, [-2, -4]),
        ("alie", {"knows": "all", "z": 1.5}, [4 - 1.5 * 1, 0.5 - 1.5 * 2.5]),
        ("alie", {"z": 9.0}, [1, 2]),  # one update that it knows has no spread
        ("free_rider", {"disguise": "none"}, [0, 0]),
    ],
)
def test_an_attack_sends_what_its_formula_says(kind: str, options: dict[str, object], expected: list[float]) -> None:
    (sent,) = attacked(kind, **options).values()
    np.testing.assert_allclose(sent["w"], expected, rtol=1e-6)
    assert sent["w"].dtype == np.float32
    assert sent["n"] == 3  # integers are no direction: what it honestly counted


def test_only_malicious_clients_that_report_forge_their_updates() -> None:
    assert attacked("sign_flip", "xyz") == {}
    assert sorted(attacked("sign_flip", "acz")) == ["a", "c"]
    assert attacked("label_flip", "a") == {}  # it attacks the data; what it learns of them it sends honestly
    assert attacked("none", "a") == {}


def test_clients_that_hide_in_the_spread_all_send_the_same_update() -> None:
    sent = attacked("alie", "ab", z=2.0)
    np.testing.assert_allclose(sent["a"]["w"], [2 - 2 * 1, 0 - 2 * 2])  # a and b: mean (2, 0), deviation (1, 2)
    np.testing.assert_array_equal(sent["a"]["w"], sent["b"]["w"])


def test_a_free_rider_repeats_the_last_global_step_and_has_none_in_the_first_round() -> None:
    previous = {"w": np.array([0.25, 1.5], np.float32), "n": np.array(0)}
    np.testing.assert_array_equal(attacked("free_rider", previous=previous)["a"]["w"], [0.25, -1.0])
    np.testing.assert_array_equal(attacked("free_rider")["a"]["w"], [0, 0])
    np.testing.assert_array_equal(attacked("free_rider", disguise="noise")["a"]["w"], [0, 0])


def test_noise_is_as_large_as_it_should_be() -> None:
    wide = {"a": {"w": np.zeros((200, 200), np.float32)}}
    step = np.where(np.arange(40_000).reshape(200, 200) % 2, 0.3, -0.1).astype(np.float32)
    rms = np.sqrt((0.3**2 + 0.1**2) / 2)
    for config, sigma in [
        (AttackConfig(kind="gaussian"), 1.0),
        (AttackConfig(kind="gaussian", sigma=7.0), 7.0),
        (AttackConfig(kind="free_rider", disguise="noise"), rms),
    ]:
        adversary = Adversary(config, frozenset("a"), seed=0)
        sent = adversary.updates(1, wide, {"w": step}, {"w": np.zeros_like(step)})["a"]["w"]
        assert sent.std() == pytest.approx(sigma, rel=0.02)  # 40,000 draws: four standard errors are 1.4 %
        assert abs(sent.mean()) < 0.02 * sigma


def test_noise_depends_on_seed_round_and_client_and_on_nothing_else() -> None:
    def noise(seed: int = 1, round_id: int = 1, client: str = "a", names: str = "ab") -> bytes:
        adversary = Adversary(AttackConfig(kind="gaussian"), frozenset(names), seed)
        return adversary.updates(round_id, {n: HONEST[n] for n in names}, VERSION)[client]["w"].tobytes()

    assert noise() == noise(names="a") == noise(names="abc")
    assert len({noise(), noise(seed=2), noise(round_id=2), noise(client="b")}) == 4


@pytest.mark.parametrize(("n", "m", "z"), [(20, 4, 0.1573), (50, 12, 0.3360), (50, 24, 1.4261)])
def test_z_is_that_of_the_formula(n: int, m: int, z: float) -> None:
    s = int(n / 2 + 1) - m
    assert little_is_enough_z(n, m) == pytest.approx(stats.norm.ppf((n - m - s) / (n - m)), abs=1e-9)
    assert little_is_enough_z(n, m) == pytest.approx(z, abs=1e-4)


@given(st.integers(1, 60), st.integers(1, 60))
def test_z_is_finite_in_every_round(clients: int, malicious: int) -> None:
    assert 0 <= little_is_enough_z(clients, min(clients, malicious)) <= 3


def test_a_majority_needs_no_cover() -> None:
    assert little_is_enough_z(5, 3) == 3


@given(arrays(np.float32, (5, 3), elements=st.floats(-100, 100, width=32)))
def test_moments_are_numpys(rows: np.ndarray) -> None:
    known = moments({str(k): {"w": row} for k, row in enumerate(rows)})
    np.testing.assert_allclose(known.mean["w"], rows.astype(np.float64).mean(axis=0), atol=1e-9)
    np.testing.assert_allclose(known.std["w"], rows.astype(np.float64).std(axis=0), atol=1e-6)


def test_a_tensor_that_some_leave_out_is_averaged_over_the_others() -> None:
    some = {"a": {"w": np.float32([2.0])}, "b": {"w": np.float32([4.0]), "v": np.float32([1.0])}}
    known = moments(some)
    assert (known.mean["w"], known.mean["v"], known.std["v"]) == ([3.0], [1.0], [0.0])


class Lazy(Mapping[str, Arrays]):
    """Updates that count the reads of each client's."""

    def __init__(self) -> None:
        self.read: list[str] = []

    def __getitem__(self, client: str) -> Arrays:
        self.read.append(client)
        return HONEST[client]

    def __iter__(self) -> Iterator[str]:
        return iter(HONEST)

    def __len__(self) -> int:
        return len(HONEST)


@pytest.mark.parametrize(
    ("kind", "read"),
    [("sign_flip", {"a"}), ("gaussian", {"a"}), ("alie", {"a"}), ("ipm", {"a", "b", "c"}), ("label_flip", set())],
)
def test_an_adversary_reads_no_more_than_it_knows(kind: str, read: set[str]) -> None:
    updates = Lazy()
    Adversary(AttackConfig.model_validate({"kind": kind}), frozenset("a"), seed=1).updates(1, updates, VERSION)
    assert set(updates.read) == read
    assert len(updates.read) <= 2 * len(HONEST) + 1


def test_an_adversary_without_honest_clients_imitates_its_own() -> None:
    adversary = Adversary(AttackConfig(kind="ipm"), frozenset("abc"), seed=1)
    np.testing.assert_allclose(adversary.updates(1, HONEST, VERSION)["b"]["w"], [-6, -2])


def test_what_is_sent_stays_finite() -> None:
    huge = {"a": {"w": np.float32([3e38])}}
    sent = Adversary(AttackConfig(kind="scaled_flip"), frozenset("a"), 1).updates(1, huge, VERSION)["a"]["w"]
    assert np.isfinite(sent).all()
    assert sent[0] < -3e38
