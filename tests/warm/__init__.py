"""A warm start of the commands of tests: a fork of a process that has imported their modules, in place of an exec.

A suite starts a thousand processes, and three quarters of their processor time went into imports. `start.install`
replaces the system call under `subprocess` and `multiprocessing`: a command line of Atoll becomes a fork of a zygote,
any other an exec as ever. The command is a child of the process that starts it, with its working directory,
environment, descriptors, umask, signals, session and group; a forked command that starts workers and ranks has a zygote
for them, and they end with it. `test_warm.py` compares both starts.

What is not as after an exec: modules are there that the command has not imported itself, its hash seed is the zygote's,
its memory holds the modules of all commands, and modules are not destroyed at its end. So a test that is about one of
these, or about the start itself, has the fixture `cold_start`. A command execs too if a variable of `READ_AT_START`
differs from that of the zygote, or if a folder of its `PYTHONPATH` hides a module. `make test-long` and
`ATOLL_COLD_START=1 make test` exec everything.
"""
