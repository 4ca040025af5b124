"""The style of docstrings and pages, and its tests."""
