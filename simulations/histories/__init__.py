"""Worlds in which everything goes wrong, from one seed each, and what judges them.

world, scenario, faults                    one world: its time, its rules and clients, what goes wrong
scheduling                                 what its processes see of it
coordinator, disk, lines                   the server's machine, and the hands around it
agent, worker, network                     the clients' sessions, and theirs
history                                    what happened
checks, referee, round_referee, buffer_referee, verdicts, facts, decisions     what must hold
judge, soak, command                       one history, many, and the command line
"""
