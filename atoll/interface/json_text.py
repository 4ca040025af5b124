"""The documents of the interface as JSON that every parser reads."""

from atoll.task.json_text import to_json

__all__ = ["to_json"]
