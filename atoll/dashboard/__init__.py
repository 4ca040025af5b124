"""The dashboard: runs, rounds, sites and members as pages in a browser, read through the Python interface alone."""
