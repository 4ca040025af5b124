"""The pure rules of a run: membership, rounds, updates, straggler policy; no clock, socket, file or randomness."""
