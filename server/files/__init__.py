"""The files of a run: versions, accepted updates, uploads in progress, and the disk space that they may take."""
