"""The agent's connections to a coordinator and its ranks: control stream, downloads, uploads."""
