"""The command line. Each command imports what it needs when it is called, so that `atoll --help` is there at once."""
