"""The gRPC servicers: they translate a call, hand it to the coordinator, and answer.

Imports: `hosting`.
"""
