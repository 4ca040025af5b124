"""The version of Atoll."""

VERSION = "0.1.0"
