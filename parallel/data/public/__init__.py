"""Public data sets in the layouts in which they are published. Nothing is downloaded: the files are on your disk.

Imports: of `data` the target that losses ignore.
"""
