"""Public data sets in the layouts in which they are published. Nothing is downloaded: the files are on your disk."""
