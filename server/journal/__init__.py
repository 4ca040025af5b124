"""The journal: encoding of events and snapshots, SQLite and PostgreSQL, the state directory."""
