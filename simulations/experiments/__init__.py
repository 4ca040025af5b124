"""Experiments with simulated runs: reports, plots, logs, comparisons and sweeps over a grid.

Imports: `federation`, `engines/processes` (the end of worker processes); `parallel` (the task, logs), `protocol` (the
settings).
"""
