"""The engine that trains many clients as one batch of models.

Imports: the files of `engines`.
"""
