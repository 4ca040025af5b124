"""The transport that both sides share: channel options, bulk messages, streams, flow control."""
