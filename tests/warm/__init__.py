"""A warm start of the commands of tests: a fork of a process that has imported their modules, in place of an exec.

A suite starts a thousand processes, and three quarters of their processor time went into imports. `install` replaces
the system call under `subprocess` and `multiprocessing`, in this process alone: a command line of Atoll becomes a fork
of a zygote, everything else an exec as ever. The command is a child of the process that starts it, with its working
directory, environment, descriptors, umask, signals, session and group, and ends as the interpreter ends; each forked
command has a zygote of its own for the workers and ranks that it starts.

What is not as after an exec: modules are there that the command has not imported itself, its hash seed is the zygote's,
its memory holds the modules of all commands, and /proc shows the zygote's command line. A test that is about one of
these, or about the start itself, has the fixture `cold_start`; `make test-long` and `ATOLL_COLD_START=1 make test` exec
throughout, as the command does when a variable of READ_AT_START differs from that of the zygote.
"""
