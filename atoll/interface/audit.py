"""Words about an audit log: the verdict of `atoll audit verify`, and the actor of an event as `audit show` has it."""

from atoll.operations.audit import actor_in_words, soundness

__all__ = ["actor_in_words", "soundness"]
