"""A native task as the two parts of a Flower app, as `atoll flower export` writes it: its client, and its server.

Only `client` and `server` import flwr, and only an exported app imports them.

Imports: `task`, `local_training`, `flower` and `worker`.
"""
