"""A simulated run of messages: the server program in its own process, and a federation in virtual time that answers it.

Imports: `federation` (sites, timeline, client states), `engines`; `server` (the machine of exchanges), `parallel`.
"""
