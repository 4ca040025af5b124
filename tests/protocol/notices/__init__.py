"""Tests of notices: when a person is told, and how."""
