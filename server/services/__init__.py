"""The gRPC servicers: they translate a call, pass it to the coordinator, and answer.

Imports: `hosting` and all that is below it.
"""
