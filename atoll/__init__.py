"""Atoll: one Task, run as a coordinator, as agents, as a simulation or as a centralized training."""

__version__ = "0.1.0"
