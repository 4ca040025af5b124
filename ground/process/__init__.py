"""A process: garbage collection, forks, log streams on a full disk, exit functions."""
