"""The read-only views of a run for people: history, sentences, reasons, narration.

Imports: `rounds`, `journal`, `files`, `protocol`, `parallel` (metrics), `aggregation` (the header of a version's file).
"""
