"""The export of a run's settings, numbers and state to other tools, each number exactly once.

Imports: `simulations/experiments` (a run's folder), `parallel` (the log of a training), `protocol`.
"""
