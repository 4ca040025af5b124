"""Flower apps as tasks: their records, the host of a `ClientApp`, and the host of a ServerApp's `main()`.

Only `records`, `client_host`, `server_host` and `strategies` import flwr, and only a worker process imports them.
"""
