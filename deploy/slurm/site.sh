#!/bin/bash
# A site of several nodes: the agent on the job's first node, and a mesh over all of them (docs/large-clients.md).
#
#   sbatch --nodes=4 --gpus-per-node=8 --export=ALL,ATOLL_JOIN=code deploy/slurm/site.sh
#
# In the folder with task.py and agent.toml; `code` is the file with the join code, which is ignored once it was used.
#SBATCH --job-name=atoll-site
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
# The agent's state lies in the folder, so a job that begins again continues with its credential and its spool.
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=atoll-site.log
# The agent is told a minute before the time limit: its ranks save, finished updates wait in the spool.
#SBATCH --signal=B:TERM@60

# exec: Slurm's signals reach the agent, with no shell between.
exec atoll agent task.py:task --config agent.toml ${ATOLL_JOIN:+--join "@$ATOLL_JOIN"}
