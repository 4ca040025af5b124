"""Fewer bytes and fewer waits between ranks: compressed gradients, replicas that meet seldom or late, rings by hand."""
