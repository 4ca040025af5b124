"""The pure members of a run: who is there, for how long, and with which history; below `server/rounds`."""
