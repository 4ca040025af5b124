"""Simulated histories of crashes, network faults and full disks, each from one seed, and the checks that judge them.

world, scenario, faults               one world: its time, its rules and clients, its faults
scheduling                            the world's interface for its processes
coordinator, disk, control_streams    a coordinator process around the run machine
agent, worker, network                an agent process around the session
history                               the record of a world
checks                                the invariants, and the decisions of `referee`
judge, soak, __main__                 one history, many, and the command line
"""
