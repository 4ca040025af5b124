"""The draw of a run's malicious clients by the run's seed."""

import hashlib
import heapq
import math
from collections.abc import Iterable
from fractions import Fraction

from atoll.ground.printable import count_of
from atoll.protocol.settings import ConfigError
from atoll.simulations.attacks.adversary import Adversary
from atoll.simulations.attacks.config import OF_COORDINATOR, AttackConfig


def adversary_of(config: AttackConfig, names: Iterable[str], seed: int) -> Adversary:
    """Draw the malicious clients; the draw depends on the seed and the set of clients, not on their order.

    Args:
        config: the attack, and the number or share of malicious clients.
        names: all clients of the run.
        seed: the seed of the run.

    Raises:
        ConfigError: more clients are malicious than the run has.
    """
    known = sorted(set(names))
    if config.kind == "none" or config.kind in OF_COORDINATOR:
        return Adversary(config, frozenset(), seed)
    wanted = config.malicious
    count = wanted if isinstance(wanted, int) else math.floor(Fraction(str(wanted)) * len(known))
    if count > len(known):
        raise ConfigError([f"attack.malicious: got {wanted}; the run has {count_of(len(known), 'client')}"])
    keys = {name: hashlib.sha256(f"atoll malicious {seed} {name}".encode()).digest() for name in known}
    return Adversary(config, frozenset(heapq.nsmallest(count, known, key=lambda name: (keys[name], name))), seed)
