#!/bin/bash
# A coordinator with aggregation ranks on its node, for sites that reach the node: a login or service node's name in
# ATOLL_PUBLIC, and ports 7070 and 7071 open, or a trial within the cluster.
#
#   sbatch --export=ALL,ATOLL_PUBLIC=node1.cluster.example.org deploy/slurm/coordinator.sh run.toml
#SBATCH --job-name=atoll-coordinator
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=4
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=atoll-coordinator.log
#SBATCH --signal=B:TERM@60

# A job that begins again replays its journal. It must get the node of that name: --nodelist, or a name that follows it.
exec atoll coordinator --aggregators "${ATOLL_RANKS:-2}" \
    --set coordinator.listen="${ATOLL_LISTEN:-0.0.0.0:7070}" \
    --set coordinator.public="${ATOLL_PUBLIC:-$(hostname -f)}" "$@"
