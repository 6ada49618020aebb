# shellcheck shell=sh
#
# Gives a rank a file for all that it writes, and becomes it. Arguments: the folder; what to start, and its arguments.
#
# Nothing is between the rank and its file: what it wrote before it was killed is there.

rank=${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-0}}
folder=$1
shift
(umask 077 && mkdir -p "$folder") || exit
file=$folder/rank-$rank.log

# In a folder of another user, or one that others may write to, links may lead to files of this one.
open=$(find "$folder/." -prune \( -perm -020 -o -perm -002 \))
# shellcheck disable=SC3067  # dash, busybox and bash know -O
if [ ! -O "$folder" ] || [ -n "$open" ]; then
    echo "ringreduce: --log-dir $folder belongs to another user, or others may write there" >&2
    exit 1
fi

# A job that continues another adds to its files.
[ -n "$RINGREDUCE_RESTART" ] || (umask 077 && : >"$file") || exit
(umask 077 && : >>"$file") || exit

# A rank that has ended is a zombie (state Z) until the launcher takes note of it.
rank_lives() {
    # shellcheck disable=SC2034  # the rest of a line is not needed
    while read -r key state rest; do
        [ "$key" != State: ] || { [ "$state" != Z ]; return; }
    done 2>/dev/null <"/proc/$$/status"
    return 1
}

# Rank 0's file is shown by processes that are nobody's children, so that the program does not wait for them. They end
# after the rank, and do not wait until the launcher has taken note of its end: that of Intel MPI does so only when they
# have.
if [ "$rank" -eq 0 ]; then
    first=$(($(wc -c <"$file") + 1))
    ( (
        # Signals that mpirun sends to the rank reach these processes, too. They ignore them, so that they show all
        # that the rank writes until it has ended.
        trap "" TERM USR1 USR2
        tail -c "+$first" -s 0.1 -f "$file" 2>/dev/null &
        while rank_lives; do
            sleep 0.5
        done
        # tail shows what came last within this time.
        sleep 0.2
        kill -KILL $!
    ) 2>/dev/null &)
fi
exec "$@" >>"$file" 2>&1
