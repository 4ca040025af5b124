"""The contents of each page: documents in, blocks of text, tables and pictures out; pure."""
