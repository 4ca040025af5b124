"""The commands that simulate federations: one run, a sweep, a comparison with centralized training, a population.

Imports: the files of `cli` itself and `cli/training`; of the rooms, `protocol`, `parallel` and `simulations`.
"""
