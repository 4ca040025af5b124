"""The fixtures of this room's tests."""

from tests.aggregation.conftest import compiled

__all__ = ["compiled"]
