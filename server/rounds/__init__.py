"""The pure rules of a run: membership, rounds, updates, straggler policy. No clock, socket, file or randomness."""
