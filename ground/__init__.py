"""The ground of every room: text that a person reads, files and folders, noise that protects."""
