"""The commands for centralized training: `atoll train` and `atoll plan`.

Imports: the files of `cli` itself and `operations`; of the rooms, `protocol` and `parallel`.
"""
