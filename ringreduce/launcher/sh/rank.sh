# shellcheck shell=sh
#
# Starts a rank where others survive it, and says how it has ended. Arguments: what to start, and its arguments.
#
# Open MPI reports only deaths by a signal to the other ranks, so any end but a good one becomes one. And this says what
# mpirun does not, whose status is 0 even if no rank has ended well.

# By SIGUSR2 the launcher says that the hosts have changed: that is for the rank.
trap "" USR2

# mpirun sends signals to end a rank to this shell, too. It stays until the rank has ended, and then says nothing.
asked_to_end=
trap "asked_to_end=1" TERM HUP INT

# mpirun sends SIGUSR1 to the whole process group, so the rank gets it, too, and ends if it has no handler. The shell
# must not end by it.
trap : USR1

# The rank says by this that all ranks have agreed to stop; nobody else sends it, and it ends nothing.
agreed=
trap "agreed=1" WINCH

export RINGREDUCE_SHELL=$$

# The launcher, or its agent on this host, reads messages from this FIFO. Opened for reading, too, it does not wait for them.
# Before the rank there is no other child of this shell, which the launcher could take for it.
say() {
    messages=${_RINGREDUCE_MESSAGES:-$RINGREDUCE_MESSAGES}/$(readlink /proc/self/ns/net)
    [ ! -p "$messages" ] || echo "$RINGREDUCE_FENCE $OMPI_COMM_WORLD_RANK ${PMIX_HOSTNAME:-$(uname -n)} $1" 1<>"$messages"
}

"$@"
code=$?

# EX_TEMPFAIL: what the rank has done is saved, as on all others, and the job is to be run again. Without an agreement it
# is a status like others.
if [ "$code" -eq 75 ] && [ -n "$agreed" ]; then
    say "has stopped"
    exit 0
fi
[ -z "$asked_to_end" ] || kill -KILL $$
if [ "$code" -eq 0 ]; then
    say "has ended well"
else
    say "has died"
    kill -KILL $$
fi
