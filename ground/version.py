"""The version of Atoll."""

__version__ = "0.1.0"
