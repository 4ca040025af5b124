"""The files of a run: versions, accepted updates, uploads in progress, and the disk that they may take.

Imports: `journal`.
"""
