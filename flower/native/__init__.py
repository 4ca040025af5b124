"""Strategies of Flower as settings of a native run, in which Atoll's rounds replace Flower's server."""
