"""The operations of Atoll as functions: load, check, simulate, train, compare, sweep, plan, connect.

The command line prints their results and the Python interface returns them. An operation prints nothing: notes during
its work go to the caller's reporter (`reporter`). An operator's mistake is a `CommandError` or a
`ConfigError`, whose faults are sentences (`faults`).
"""
