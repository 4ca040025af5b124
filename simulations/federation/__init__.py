"""A federation in one process: the deployed state machines of coordinator and clients in virtual time, with real
training and folds.

Imports: `attacks`, `devices`, `engines`, `populations`; `server` (rounds, selection, settings, the fold, the files of
versions, the journal's codec), `client` (the session, limits of its state), `parallel` (the task, the worker's
benches), `aggregation`, `protocol`.
"""
