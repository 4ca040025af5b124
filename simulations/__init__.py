"""The world in one process: virtual clock, network, faults."""
