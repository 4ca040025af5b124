"""Large models of which a small part is trained: the base's files, digests of what stays at the sites, adapters.

Imports: `task`.
"""
