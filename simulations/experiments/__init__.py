"""Experiments with simulated runs: reports, plots, logs, comparisons and sweeps over a grid."""
