"""The collectives written out over point-to-point sends: for reading and for the benchmark, never on the hot path."""
