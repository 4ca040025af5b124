"""A native task as a Flower app, as `atoll flower export` writes it: its client and its server.

Only `client` and `server` import flwr, and only an exported app imports them.
"""
