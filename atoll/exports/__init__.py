"""The export of a run's settings, numbers and state to other tools, each number exactly once."""
