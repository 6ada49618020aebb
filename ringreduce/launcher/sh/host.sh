# shellcheck shell=sh
#
# Lets a rank find on its host what was found where the job was started, and becomes it. Arguments: the name of that
# first host; the program, or its path if no other will do; the folder in which that is there, or nothing; the file that
# the program reads as its script, or nothing; the folder of ringreduce there; what to start, and its arguments.

first=$1
program=$2
folder=$3
script=$4
package=$5
shift 5
rank=${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-0}}
host=${PMIX_HOSTNAME:-$(uname -n)}

# The rank has not begun, so this is all that is said of it.
lacks() {
    echo "ringreduce: rank $rank on $host finds no $1; on $first it is $2: install or copy it, or share a folder" >&2
    exit 127
}

# A login shell of this host sets a path of its own, where the program of an environment is not.
if [ -n "$folder" ]; then
    export PATH="$folder:$PATH"
fi
for path in "$program" "$script"; do
    [ "$path" = "${path%/*}" ] || [ -e "$path" ] || lacks "$(basename "$path") in $(dirname "$path")" "there"
done
command -v "$program" >/dev/null || lacks "$program" "$folder/$program"

# The launcher waits for the first of these, and says the second where Python then finds no ringreduce.
messages=${_RINGREDUCE_MESSAGES:-$RINGREDUCE_MESSAGES}/$(readlink /proc/self/ns/net)
say() { [ ! -p "$messages" ] || echo "$RINGREDUCE_FENCE $rank $host $1" 1<>"$messages"; }
say "has come"
[ -d "$package" ] || say "has no package there"

# Ranks are not bound to cores on several hosts, so that the threads of a rank find cores of their own.
if [ -z "$OMP_NUM_THREADS" ]; then
    OMP_NUM_THREADS=$(($(nproc) / ${OMPI_COMM_WORLD_LOCAL_SIZE:-${MPI_LOCALNRANKS:-1}}))
    [ "$OMP_NUM_THREADS" -gt 0 ] || OMP_NUM_THREADS=1
    export OMP_NUM_THREADS
fi
exec "$@"
