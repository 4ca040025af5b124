"""The pure rules of a run: rounds, updates, straggler policy; no clock, socket, file or randomness."""
