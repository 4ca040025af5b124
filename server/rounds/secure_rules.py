"""The rules of secure sums in a run: their encoding, their sessions, their deadlines. Pure values."""

from dataclasses import dataclass
from typing import Literal

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
    """Most members of a session."""
    sessions: int = 1
    """Number of sessions in a round, at least."""
    stage_timeout: float = 60.0
    """Seconds for each stage of a session."""
    attempts: int = 3
    """Most attempts at a session's sum, each with new keys, before its survivors are told."""
