"""The adversary of a run: its malicious clients, drawn by the run's seed."""

import hashlib
import heapq
import math
from collections.abc import Iterable
from fractions import Fraction

from atoll.protocol.settings import ConfigError
from atoll.simulations.attacks.adversary import Adversary
from atoll.simulations.attacks.config import AttackConfig


def adversary_of(config: AttackConfig, names: Iterable[str], seed: int) -> Adversary:
    """Draw the malicious clients; the same clients and seed give the same draw, in whatever order the clients come.

    Args:
        config: the attack, and the number or share of malicious clients.
        names: all clients of the run.
        seed: of the run.

    Raises:
        ConfigError: there are fewer clients than malicious ones.
    """
    known = sorted(set(names))
    if config.kind == "none":
        return Adversary(config, frozenset(), seed)
    wanted = config.malicious
    count = wanted if isinstance(wanted, int) else math.floor(Fraction(str(wanted)) * len(known))
    if count > len(known):
        raise ConfigError([f"attack.malicious: got {wanted}; there are {len(known)} clients"])
    keys = {name: hashlib.sha256(f"atoll malicious {seed} {name}".encode()).digest() for name in known}
    return Adversary(config, frozenset(heapq.nsmallest(count, known, key=lambda name: (keys[name], name))), seed)
