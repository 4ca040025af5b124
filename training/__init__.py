"""The training of one client in one process: local training, worker, statistics of its data, frozen bases, adapters."""
