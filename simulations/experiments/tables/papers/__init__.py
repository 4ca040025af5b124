"""Results of papers, repeated: each module is one paper's table, which is written into `docs/papers.md`.

Imports: `tables`, `experiments`.
"""
