"""The experiments whose results are tables of the documentation.

Imports: the files of `experiments`.
"""
