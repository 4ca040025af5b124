"""The gRPC servicers: they translate a call, pass it to the coordinator, and answer."""
