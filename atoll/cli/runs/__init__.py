"""The commands about a coordinator's runs, rounds, model versions and aggregation ranks.

`admin` calls a running coordinator, `views` reads its state, `following` reads on, `model_export` copies a version of a
model.

Imports: the files of `cli` itself; of the rooms, `protocol`, `server` and `aggregation/tensors`.
"""
