"""The agent's connections to a coordinator and its ranks: control stream, downloads, uploads.

Imports: `session`, `disk`, `policy` and `protocol`; from the ground `aggregation/codecs`.
"""
