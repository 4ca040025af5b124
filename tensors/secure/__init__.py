"""The words of a secure sum: their positions, the streams that mask them, and the numbers that they stand for."""
