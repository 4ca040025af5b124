"""The collectives written out as point-to-point sends: for reading and for the benchmark, never on the hot path."""
