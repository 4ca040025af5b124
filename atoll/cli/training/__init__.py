"""The commands for centralized training: `atoll train`, with the launch of its ranks, and `atoll plan`.

Imports: the files of `cli` itself; of the rooms, `protocol` and `parallel`.
"""
