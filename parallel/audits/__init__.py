"""Audits of private trainings with canary examples: what a model tells of them, as a lower bound of epsilon."""
