"""The sentence of a guarantee: it states everything that the numbers depend on."""

from atoll.protocol.privacy.guarantee import EXACT, PLD, Guarantee


def test_a_guarantee_for_clients_is_stated_whole() -> None:
    sentence = Guarantee(7.98, 1e-6, "client", "gaussian", 2.07, 1.5, 10, EXACT, "coordinator").sentence
    for part in (
        *("epsilon 7.98 at delta 1e-06 for one client", "contributions of one client are zero", "is public"),
        *("the Gaussian mechanism", "noise multiplier 2.07", "norm 1.5", "at most 10 uses of one client"),
        *("no sampling is assumed", "the coordinator adds the noise, and is trusted", "Balle and Wang 2018"),
        "Not covered: who takes part",
    ):
        assert part in sentence


def test_a_guarantee_for_examples_states_its_sampling() -> None:
    sentence = Guarantee(1.0, 1e-5, "example", "gaussian", 3.8, 1.0, 10_000, PLD, "site", 0.01).sentence
    for part in ("one example more", "10000 steps", "probability 0.01, independently", "dp-accounting", "each site"):
        assert part in sentence


def test_the_separation_of_correlated_noise_is_stated() -> None:
    sentence = Guarantee(2.0, 1e-5, "client", "correlated", 2.0, 1.0, 10, EXACT, "clients", separation=10).sentence
    assert "correlated over rounds" in sentence
    assert "at most 10 uses of one client, at least 10 rounds apart" in sentence
    assert "the clients add the noise" in sentence
