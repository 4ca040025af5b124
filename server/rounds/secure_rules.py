"""The rules of secure sums in a run: their encoding, their sessions, their deadlines. Pure values."""

from dataclasses import dataclass
from typing import Literal

from atoll.protocol.secure.session_size import MEMBERS_MIN, threshold_of

Bits = Literal[32, 64]


@dataclass(frozen=True, slots=True)
class SecureRules:
    """Rules of the secure sums of a run, from its `[secure]` table."""

    clip_norm: float
    """Largest norm of an update [its units]; a longer one is clipped at its site."""
    bits: Bits = 32
    """Bits of a word of the sum."""
    examples_max: int = 0
    """Examples with weight 1; 0: all updates have weight 1."""
    threshold: str = "two_thirds"
    """Rule of the least number of members that opens a sum, as in the terms."""
    session_max: int = 64
    """Most members of a session, at least `SESSION_MAX_LEAST`."""
    sessions: int = 1
    """Number of sessions in a round, at least."""
    stage_timeout: float = 60.0
    """Seconds for each stage of a session."""
    attempts: int = 3
    """Most attempts at a session's sum, each with new keys, before its survivors are told."""

    metrics: tuple[tuple[str, int], ...] = (("loss", 2),)
    """Metrics of the training whose sums are added, by name, each with its number of sums."""

    is_private: bool = False
    """Whether the sums have noise for differential privacy, so that nothing else depends on data."""
    share: float = 0.0
    """Standard deviation of the noise that each member adds [steps of the sum]; 0: none."""
    sum_min: int = 0
    """Fewest members of a sum, for its noise."""

    def sizes(self, clients: int) -> tuple[int, ...]:
        """Return the sizes of the sessions into which a round's clients are divided, which differ by at most one.

        There are `sessions` of them, more if one would have more than `session_max` members, and fewer if one would
        have fewer than three; none of fewer than three clients.
        """
        wanted = max(self.sessions, -(-clients // self.session_max))
        number = min(wanted, clients // MEMBERS_MIN)
        if not number:
            return ()
        size, larger = divmod(clients, number)
        return (size + 1,) * larger + (size,) * (number - larger)

    def threshold_of(self, members: int) -> int:
        """Return how many of a session's members open its sum."""
        return threshold_of(self.threshold, members)
