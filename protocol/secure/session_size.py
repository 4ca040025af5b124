"""The limits of a session: its members, the rule of its threshold, its attempts, the length of its terms."""

MEMBERS_MIN, MEMBERS_MAX = 3, 64
SESSION_MAX_LEAST = 2 * MEMBERS_MIN - 1
"""Least allowed value of a session's largest size: any larger number of clients divides into sessions up to that."""
ATTEMPTS_MAX = 100
TWO_THIRDS = "two_thirds"
BYTES_MAX = 64 * 1024
"""Largest length of the terms [bytes]."""
TEXT_MAX = 16 * 1024
"""Largest length of a text in the terms, such as `local` [characters]."""


def threshold_of(rule: str, members: int) -> int:
    """Return how many of n `members` open a sum: floor(2n / 3) + 1 by the rule "two_thirds", else the rule's count."""
    return 2 * members // 3 + 1 if rule == TWO_THIRDS else int(rule)
