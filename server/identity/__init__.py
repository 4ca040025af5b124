"""Identity: the authority, the members and their roles, and the guard that checks every call.

Imports: `audit`, `config`, `journal` (the register is in the state's database), `transport`.
"""
