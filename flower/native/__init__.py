"""Strategies of Flower as settings of a native run: rules, server optimizers, terms."""
