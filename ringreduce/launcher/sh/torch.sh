# shellcheck shell=sh
#
# Sets the variables by which programs that know torch's launcher find the ranks, and becomes the rank. Arguments: what to
# start, and its arguments.

# Open MPI's variables, or those of MPICH and Intel MPI; with neither, the rank is alone.
export RANK="${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-0}}" \
    WORLD_SIZE="${OMPI_COMM_WORLD_SIZE:-${PMI_SIZE:-1}}" \
    LOCAL_RANK="${OMPI_COMM_WORLD_LOCAL_RANK:-${MPI_LOCALRANKID:-0}}" \
    LOCAL_WORLD_SIZE="${OMPI_COMM_WORLD_LOCAL_SIZE:-${MPI_LOCALNRANKS:-1}}"

# Where rank 0 listens; nowhere, if ranks have a key, as nothing there would be encrypted.
if [ "$RINGREDUCE_MASTER_ADDR" = - ]; then
    unset MASTER_ADDR MASTER_PORT
else
    export MASTER_ADDR="$RINGREDUCE_MASTER_ADDR" MASTER_PORT="$RINGREDUCE_MASTER_PORT"
fi
exec "$@"
