"""The pure rules of an agent: its session as a state machine, its events and effects, the refusal of rollback."""
