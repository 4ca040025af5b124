"""The commands on a Flower app: a check of how it runs, and its run on this machine.

Imports: the files of `cli` itself, `cli/experiments` for a simulation; of the rooms, `parallel`, `server` and
`simulations`.
"""
