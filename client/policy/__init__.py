"""What the owner of some data allows: rules that no coordinator can weaken, and the record of every decision."""
