"""The examples of each data-parallel rank in each step, and their loading; resumable to the exact example."""
