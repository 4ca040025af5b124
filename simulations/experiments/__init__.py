"""What a person makes of simulated runs: reports, plots, logs, sweeps over a grid, the papers' tables."""
