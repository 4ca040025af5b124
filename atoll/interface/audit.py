"""The verdict on an audit log in words, as `atoll audit verify` prints it."""

from atoll.operations.audit import soundness

__all__ = ["soundness"]
