"""The updates of a round as files: block reader, encoded writer, inspection, statistics per tensor."""
