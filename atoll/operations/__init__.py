"""The operations of Atoll as functions: load, check, simulate, train, compare, sweep, plan, connect.

The command line prints their results and the Python interface returns them. An operation prints nothing: what it has to
tell while it works goes to the caller's reporter (`reporter`). An operator's mistake is a `CommandError` or a
`ConfigError`, whose faults are sentences (`faults`).
"""
