"""The referee of simulated histories: a second, slower implementation of a run's policy, independent of the machines.

It reads the events on the coordinator's disk, derives from the policy what each of them requires at its time, and
compares. It shares with the machines only their vocabulary.

referee                  a run, from event to event
round_referee            rounds of a synchronous run
buffer_referee           buffers of an asynchronous run
measure_referee          the best version and the early stop
run_facts, verdicts      the facts of a run, and the verdict on an update
sampler_view             the clients as a sampler sees them
decisions                the decisions of the machine in the referee's form
"""
