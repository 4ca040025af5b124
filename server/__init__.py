"""The coordinator process."""
