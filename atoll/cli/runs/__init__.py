"""The commands about a coordinator's runs, rounds, model versions and aggregation ranks.

Imports: the files of `cli` itself and `operations`; of the rooms, `protocol`.
"""
