"""The policy of a site's data owner: rules that no coordinator can weaken, and the log of every decision.

Imports: `session`, `disk` and `protocol`; from the ground `aggregation/codecs`.
"""
