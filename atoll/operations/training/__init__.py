"""A centralized training: the job that its request names, its folder, and the processes that train.

Imports: the files of `operations` itself and `exports`; of the rooms, `protocol` and `parallel`.
"""
