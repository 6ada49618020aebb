# shellcheck shell=sh
#
# Sets Horovod's variables for a rank, and becomes it. Arguments: how many ranks the nodes have, in their order, in one
# text, or nothing: each has as many as this one; what to start, and its arguments.

counts=$1
shift

# Open MPI's variables, or those of MPICH and Intel MPI; with neither, the rank is alone.
export HOROVOD_RANK="${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-0}}" \
    HOROVOD_SIZE="${OMPI_COMM_WORLD_SIZE:-${PMI_SIZE:-1}}" \
    HOROVOD_LOCAL_RANK="${OMPI_COMM_WORLD_LOCAL_RANK:-${MPI_LOCALRANKID:-0}}" \
    HOROVOD_LOCAL_SIZE="${OMPI_COMM_WORLD_LOCAL_SIZE:-${MPI_LOCALNRANKS:-1}}" \
    HOROVOD_HOSTNAME="${PMIX_HOSTNAME:-$(uname -n)}" \
    HOROVOD_CROSS_RANK=0 \
    HOROVOD_CROSS_SIZE=0

# No launcher says on which node a rank is. Ranks of a node follow each other, so its first one says it.
first=$((HOROVOD_RANK - HOROVOD_LOCAL_RANK))
start=0
[ -n "$counts" ] || while [ "$start" -lt "$HOROVOD_SIZE" ]; do
    counts="$counts $HOROVOD_LOCAL_SIZE"
    start=$((start + HOROVOD_LOCAL_SIZE))
done

# Of the nodes that have a rank with this local rank: how many there are, and how many are before this one.
start=0
for count in $counts; do
    if [ "$count" -gt "$HOROVOD_LOCAL_RANK" ]; then
        HOROVOD_CROSS_SIZE=$((HOROVOD_CROSS_SIZE + 1))
        [ "$start" -ge "$first" ] || HOROVOD_CROSS_RANK=$((HOROVOD_CROSS_RANK + 1))
    fi
    start=$((start + count))
done
exec "$@"
