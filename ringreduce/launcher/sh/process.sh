# shellcheck shell=sh
#
# Lets the ranks of a host know which process a rank is, and becomes it. Arguments: what to start, and its arguments.
#
# mpirun does not end a job for a rank that ends well before it has started MPI, and misses some that fail there: the
# others look by themselves, at the process of this number. The folder is that of the job on this host; a user who has made
# one of this name beforehand could have put links into it.

# shellcheck disable=SC3067  # dash, busybox and bash know -O
[ ! -O "$PMIX_SERVER_TMPDIR" ] || echo $$ >"$PMIX_SERVER_TMPDIR/ringreduce-process-$OMPI_COMM_WORLD_RANK"
exec "$@"
