"""The commands that run a coordinator, an aggregation rank or an agent, and those that back up a coordinator's state.

Imports: the files of `cli` itself; of the rooms, `protocol`, `server`, `client` and `parallel/task`.
"""
