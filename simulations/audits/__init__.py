"""Audits of private sums with canaries: what an adversary learns from a release, as a lower bound of epsilon."""
