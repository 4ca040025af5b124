from collections import Counter

import pytest

from atoll.protocol.settings import ConfigError, load_text
from atoll.simulations.attacks.build import adversary_of
from atoll.simulations.attacks.config import AttackConfig

NAMES = [f"c{k:02d}" for k in range(20)]


@pytest.mark.parametrize(("malicious", "count"), [(4, 4), (0.2, 4), (0.29, 5), (0, 0), (1.0, 20), (20, 20)])
def test_the_number_of_malicious_clients_is_the_configured_one(malicious: int | float, count: int) -> None:
    chosen = adversary_of(AttackConfig(kind="sign_flip", malicious=malicious), NAMES, seed=7).malicious
    assert len(chosen) == count
    assert chosen <= set(NAMES)


def test_a_share_is_meant_as_it_is_written() -> None:
    attack = AttackConfig(kind="sign_flip", malicious=0.29)
    assert len(adversary_of(attack, map(str, range(100)), seed=0).malicious) == 29


def test_the_malicious_clients_depend_on_the_seed_and_not_on_the_order() -> None:
    attack = AttackConfig(kind="alie", malicious=4)
    assert adversary_of(attack, NAMES, 3).malicious == adversary_of(attack, reversed(NAMES), 3).malicious
    assert len({adversary_of(attack, NAMES, seed).malicious for seed in range(20)}) > 15
    counts = Counter(name for seed in range(500) for name in adversary_of(attack, NAMES, seed).malicious)
    assert min(counts.values()) > 65  # 100 each on average, standard deviation 9
    assert max(counts.values()) < 135


def test_without_an_attack_no_client_is_malicious() -> None:
    assert adversary_of(AttackConfig(), NAMES, 1).malicious == frozenset()


def test_more_malicious_clients_than_there_are_is_a_fault() -> None:
    with pytest.raises(ConfigError, match=r"attack.malicious: got 21; the run has 20 clients"):
        adversary_of(AttackConfig(kind="ipm", malicious=21), NAMES, 1)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('kind = "label_swap"', 'kind: got \'label_swap\'; allowed: "none" | "label_flip"'),
        ('kind = "alie"\nsigma = 2.0', "sigma is not an option of alie (allowed: knows, z)"),
        ("z = 1.0", "z is not an option of none (allowed: none)"),
        ('kind = "ipm"\nmalicious = 1.5', "malicious: got 1.5; allowed: integer >= 0 | number >= 0, <= 1"),
        ('kind = "ipm"\nmalicious = true', "malicious: got True"),
        ('kind = "gaussian"\nsigma = inf', "sigma: got inf"),
    ],
)
def test_a_wrong_setting_is_named(text: str, fault: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_text(AttackConfig, text, name="")
    assert fault in str(error.value)
