"""The fold of updates that are rows of one matrix in memory, as in the simulator."""
