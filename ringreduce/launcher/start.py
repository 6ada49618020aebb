"""The start of a job: its options, checked before any rank starts, as a command line and variables."""

from __future__ import annotations

import os
import re
import resource
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from ringreduce.common.config import Config
from ringreduce.common.errors import ConfigError, ForeignFileError
from ringreduce.common.files import own_folder, require_writable
from ringreduce.common.keys import KEY_VARIABLE, read_secret
from ringreduce.common.settings import rows
from ringreduce.launcher.hosts import LOCAL, UNNAMED, SizePolicy, fill, is_here
from ringreduce.launcher.mpirun import Mpirun, find
from ringreduce.launcher.python_line import PythonLine, script_of
from ringreduce.launcher.schedulers import Allocation, slurm_job
from ringreduce.launcher.shells import shell
from ringreduce.launcher.spec import LaunchSpec
from ringreduce.launcher.stderr import say
from ringreduce.launcher.stdin import is_passed_on, reader, with_program

#: By which Open MPI is set to start more ranks than there are slots.
_MAPPING = ("PRTE_MCA_rmaps_default_mapping_policy", "OMPI_MCA_rmaps_base_mapping_policy")

#: Starts a rank where others survive it, and says how it has ended.
SUPERVISOR = shell("rank")
#: Lets a SIGUSR2 wait until the rank looks for it. It is blocked before there are any threads, and in all that the rank
#: starts; mpirun sends it to these, too.
HEARING = (
    *(sys.executable, "-I", "-S", "-c"),
    "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2}); "
    "os.execvp(sys.argv[1], sys.argv[1:])",
)
#: Lets the ranks of a host know which process a rank is.
_KNOWN = shell("process")
#: Gives a rank a file for all that it writes; takes the folder.
_INTO_FILE = shell("log")
#: Sets Horovod's variables for a rank; takes how many ranks the nodes have, in their order.
_IN_HOROVODS_WORDS = shell("horovod")
#: Sets the variables of torch's launcher for a rank.
_IN_TORCHS_WORDS = shell("torch")
#: Lets a rank of another host find its program; takes what `Start._found_here` returns.
_ON_ITS_HOST = shell("host")
#: By these, each launcher reaches hosts in another manner than by the ssh on the path.
AGENTS = {
    "Open MPI": ("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent"),
    "MPICH": ("HYDRA_LAUNCHER", "HYDRA_LAUNCHER_EXEC"),
    "Intel MPI": ("I_MPI_HYDRA_BOOTSTRAP", "I_MPI_HYDRA_BOOTSTRAP_EXEC"),
}
#: Variables that belong to a host, a login or a process, and say nothing to another host.
_OF_THIS_HOST = re.compile(
    "BASH_FUNC_.*|_|_RINGREDUCE_.*|PWD|OLDPWD|SHLVL|HOSTNAME|HOME|USER|LOGNAME|SHELL|MAIL|TERM|TMPDIR|DISPLAY|XAUTHORITY|LS_COLORS|"
    "(SSH|XDG|DBUS|SLURM|PMI|PMIX|PRTE|OMPI|OPAL|HYDRA|MPI|I_MPI|TTY|TMUX|STY)(_.*)?"
)


@dataclass(frozen=True)
class Start:
    """Makes the command line of a job for a number of ranks on each host.

    Attributes:
        spec: options of the job.
        mpirun: mpirun of the job.
        policy: numbers of ranks, and for how long hosts fail.
        here: the names of this machine.
        listed: slots by host at the start; if a script finds the hosts, those without it.
        slots: by host, for mpirun, where these do not change; none: this machine, or what mpirun finds itself.
        remote: whether there may be other hosts.
        by_ssh: whether mpirun reaches these by ssh.
        grows: whether the job can begin again on other hosts, at a commit of its ranks.
        allocation: hosts that a scheduler has granted; None if users name the hosts, or there is this machine alone.
        passes_stdin: whether mpirun reads the standard input of this command.
        reader: words before the program, by which rank 0 reads the standard input of this command.
        there: returns a word of the command line as other hosts, and this one, have it.
        has_copies: whether hosts have copies of files for this job alone, which a host that was lost may lack.
        networks: variables by which MPI leaves out networks that join no hosts.
        port: for rank 0, where programs of torch.distributed meet; 0: none.
        lost: hosts that were lost and have not answered again, by their names in the list, or their own if it has none.
    """

    spec: LaunchSpec
    mpirun: Mpirun
    policy: SizePolicy
    here: frozenset[str]
    listed: Mapping[str, int] = field(default_factory=dict)
    slots: Mapping[str, int] = field(default_factory=dict)
    remote: bool = False
    by_ssh: bool = False
    grows: bool = False
    allocation: Allocation | None = None
    passes_stdin: bool = True
    reader: tuple[str, ...] = ()
    there: Callable[[str], str] = str
    has_copies: bool = False
    networks: Mapping[str, str] = field(default_factory=dict)
    port: int = 0
    lost: set[str] = field(default_factory=set)

    @property
    def asks_lost_hosts(self) -> bool:
        """Whether a host that was lost is used again once it answers."""
        return self.by_ssh and self.grows and not self.has_copies and self.spec.results is None

    def has_lost(self, host: str) -> bool:
        """Return whether a host was lost, by its name in a list or without the domain."""
        return host in self.lost or host.partition(".")[0] in self.lost

    def is_remote(self, ranks: Mapping[str, int]) -> bool:
        """Return whether a job of so many ranks by host may have other hosts."""
        named = ranks.keys() - {UNNAMED}
        return not all(is_here(host, self.here) for host in named) if named else self.remote

    def places(self, ranks: Mapping[str, int]) -> dict[str, int]:
        """Return the ranks of a job by host, in their order, as far as hosts are known."""
        named = {host: count for host, count in ranks.items() if host != UNNAMED}
        slots = self.slots or (self.allocation.slots if self.allocation is not None else {})
        return named or fill(slots, sum(ranks.values())) or dict(ranks)

    def _master(
        self, ranks: Mapping[str, int], exported: Mapping[str, str | None], environ: Mapping[str, str]
    ) -> dict[str, str]:
        """Return variables that say where rank 0 listens for torch.distributed; ``-``: nowhere, as ranks have a key.

        Args:
            ranks: by host.
            exported: variables that the user has named; these count.
            environ: of the ranks.
        """
        first = next(iter(self.places(ranks)))
        host = first if first not in (UNNAMED, *LOCAL) else os.uname().nodename
        found = {"MASTER_ADDR": host if self.is_remote(ranks) else "127.0.0.1", "MASTER_PORT": str(self.port)}
        if environ.get(KEY_VARIABLE):
            found = dict.fromkeys(found, "-")
        found |= {name: environ[name] for name in found if name in exported}
        return {f"RINGREDUCE_{name}": value for name, value in found.items()}

    def with_stdin(self) -> Start:
        """Return this with the standard input of the ranks; for errors see `with_program` and `reader`."""
        if is_passed_on(self.spec):
            return self
        spec = with_program(self.spec)
        if self.mpirun.kind == "Open MPI":
            spec = replace(spec, more=("--stdin", "none", *spec.more))  # or rank 0 would never see the end
        first = next(iter(self.listed), UNNAMED)
        words = reader(rank_0_is_here=is_here(first, self.here)) if spec.stdin else ()
        return replace(self, spec=spec, passes_stdin=False, reader=words)

    def command(self, ranks: Mapping[str, int], more: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
        """Return the command line and the environment of a job.

        Args:
            ranks: ranks by host.
            more: more variables of this job.
        """
        line, settings = self.line_and_settings(ranks, more)
        if self.spec.verbose:
            say(f"set for mpirun: {self.describe(settings)}")
            say(f"starting {shlex.join(line)}")
        return line, {**os.environ, **settings, **more}

    def line_and_settings(self, ranks: Mapping[str, int], more: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
        """Return the command line, and the variables that are set for it; arguments as for `command`."""
        spec = self.spec
        count = sum(ranks.values())
        named = {host: number for host, number in ranks.items() if host != UNNAMED}
        remote = self.is_remote(ranks)
        exported = spec.variables()
        variables = {name: value for name, value in exported.items() if value is not None}
        told = spec.set_for_ranks()
        environ = {**os.environ, **told, **variables}
        settings = self.mpirun.settings(spec, count, environ, remote=remote, by_ssh=remote and self.by_ssh)
        if remote:
            settings |= self.networks
        if spec.elastic and slurm_job(os.environ):
            # Or the daemons of a new start would wait until Slurm knows that a lost host is down.
            settings["SLURM_OVERLAP"] = "1"
        always = {row.variable: row.always for _, _, row in rows(Config) if row.always}
        settings |= {**{name: text for name, text in always.items() if name not in environ}, **told}
        if self.grows:
            settings["RINGREDUCE_RESTARTABLE"] = "1"
        if spec.rank_variables:
            settings |= self._master(ranks, exported, environ)
        if spec.folder is not None and "PYTHONUNBUFFERED" not in os.environ:
            settings["PYTHONUNBUFFERED"] = "1"  # or what is written to a file comes late, and errors before the rest
        settings |= variables
        sent = {*exported, *({"PYTHONUNBUFFERED"} & settings.keys())}
        names = sorted(
            name
            for name in {**os.environ, **settings, **more}
            if name in sent
            or name.startswith(("RINGREDUCE_", "HOROVOD_", "OMP_"))
            or (spec.env == "all" and _OF_THIS_HOST.fullmatch(name) is None)
        )
        line = self.mpirun.command(
            spec,
            count,
            named or self.slots,
            hostfile=None if named else spec.hostfile,
            exported=names if remote else (),
            program=self._program(count, fill(named or self.slots, count), remote=remote),
        )
        return [self.there(word) for word in line], settings

    def _program(self, count: int, ranks: Mapping[str, int], *, remote: bool) -> list[str]:
        """Return the command that mpirun starts as each rank, for a number of ranks in all and by host."""
        spec = self.spec
        return [
            *(SUPERVISOR if spec.elastic else ()),
            *(_KNOWN if count > 1 and self.mpirun.kind == "Open MPI" else ()),
            *(HEARING if self.grows else ()),
            *((*_ON_ITS_HOST, *self._found_here()) if remote else ()),  # what this says is no rank's
            *((*_INTO_FILE, os.path.abspath(spec.folder)) if spec.folder is not None else ()),
            *(_IN_TORCHS_WORDS if spec.rank_variables else ()),
            *((*_IN_HOROVODS_WORDS, " ".join(map(str, ranks.values()))) if spec.horovod else ()),
            *self.reader,
            *spec.program,
        ]

    def _found_here(self) -> list[str]:
        """Return the files that a rank needs on its host: see the program ``sh/host.sh``."""
        spec = self.spec
        program = shutil.which(spec.program[0])
        folder = os.path.dirname(os.path.abspath(program)) if program and os.sep not in spec.program[0] else ""
        name = spec.program[0]
        is_python = PythonLine.of(spec.program) is not None
        if folder and is_python and os.path.exists(os.path.join(folder, os.pardir, "pyvenv.cfg")):
            name = os.path.join(folder, name)  # another Python of a host has not what is in this environment
        script = script_of(spec.program)
        # What another program reads may be its own business, and not a matter of every host.
        reads = os.path.exists(script) and (script.endswith(".py") or is_python)
        package = str(Path(__file__).parents[1])
        return [os.uname().nodename, name, folder, os.path.abspath(script) if reads else "", package]

    def describe(self, settings: Mapping[str, str]) -> str:
        """Return settings as a shell takes them, without the values of users' own variables, which may be secret."""
        own = self.spec.variables()
        return " ".join(
            f'{name}="${name}"' if name in own else f"{name}={shlex.quote(value)}" for name, value in settings.items()
        )


def prepare(spec: LaunchSpec) -> Start:
    """Return the start of a job.

    Raises:
        ConfigError: options contradict each other, or something that they need is missing here.
    """
    spec.require_sense()
    spec.require_own_script()
    if KEY_VARIABLE in spec.settings:
        read_secret(spec.settings[KEY_VARIABLE], "--encrypt")
    variables = spec.variables()
    named = spec.named_hosts()
    mpirun = find(required=False)
    allocation = None if named or spec.script else Allocation.find(os.environ, mpirun.kind)
    granted = named or (allocation.slots if allocation is not None else {})
    ranks = _ranks(spec, granted)
    if granted and not spec.growth and not spec.oversubscribe:
        _require_slots(spec, ranks, granted, allocation)
    name = os.uname().nodename
    here = frozenset({name, name.partition(".")[0], *(() if named else (UNNAMED,))})
    elsewhere = not all(is_here(host, here) for host in granted)
    program = _startable(spec.program, checks=not (elsewhere or spec.more or "PATH" in variables))
    most = spec.most or ranks
    if not elsewhere:
        _require_room(most)
    if not mpirun.path and (ranks > 1 or spec.elastic or elsewhere or spec.prefix or bool(spec.more)):
        mpirun = find()  # which says what is missing
    if spec.elastic:
        _require_ob1(os.environ)
        if mpirun.kind != "Open MPI" or mpirun.major < 5:
            raise ConfigError(
                f"--elastic needs Open MPI 5, where ranks survive others; {mpirun.path} says {mpirun.said!r}"
            )
    policy = SizePolicy(spec.least or 1, most, spec.cooldown, forgives=not spec.growth)
    # A job that survives the loss of a host is started on hosts that are named.
    listed = granted if granted and (spec.growth or (spec.elastic and elsewhere)) else {UNNAMED: ranks}
    if sum(listed.values()) < policy.least:
        raise ConfigError(f"the hosts have {sum(listed.values())} slots, and --min-np is {policy.least}; see --slots")
    finds_itself = allocation is not None and mpirun.reads(allocation.scheduler)
    # Another agent in place of ssh may take other options.
    agent = [name for name in AGENTS.get(mpirun.kind, ()) if name in os.environ]
    agent += [word for word in spec.more if "agent" in word]
    by_ssh = mpirun.needs_ssh(Allocation.scheduler_here(os.environ)) and not agent
    if elsewhere and by_ssh and shutil.which("ssh") is None:
        raise ConfigError("mpirun reaches other hosts by ssh, and there is no program ssh here: install openssh-client")
    return Start(
        replace(spec, program=program),
        mpirun,
        policy=policy,
        here=here,
        listed=listed,
        slots={} if finds_itself else granted,
        remote=elsewhere or spec.script is not None,
        by_ssh=by_ssh,
        grows=bool(spec.growth) or (spec.elastic and len(listed) > 1 and spec.folder is None),
        allocation=allocation,
    )


def _ranks(spec: LaunchSpec, granted: Mapping[str, int]) -> int:
    """Return the number of ranks that a job starts with, by the slots of the hosts."""
    ranks = spec.ranks
    most = spec.most
    if ranks is None:
        there = sum(granted.values()) or 1
        ranks = there if most is None else min(there, most)
    if most is not None and most < ranks:
        raise ConfigError(f"--max-np {most} is less than the {ranks} ranks of -np")
    if most is not None and most > ranks and not (granted or spec.script):
        raise ConfigError(
            f"--max-np {most} is more than the {ranks} slots of this machine that -np gives; name hosts with "
            f"more: -H localhost:{most}, --hostfile or --host-discovery-script"
        )
    if spec.least is not None and spec.least > (most or ranks):
        starts = "-np" if most is None else "--max-np"
        raise ConfigError(f"--min-np {spec.least} is more than the {most or ranks} ranks that {starts} starts")
    return ranks


def _require_slots(spec: LaunchSpec, ranks: int, slots: Mapping[str, int], allocation: Allocation | None) -> None:
    """Raise a `ConfigError` if the hosts have fewer slots than ranks, and mpirun keeps to those."""
    settings = "".join(os.environ.get(name, "") for name in _MAPPING) + " ".join(spec.more)
    there = sum(slots.values())
    if ranks <= there or "oversubscribe" in settings:
        return
    if allocation is not None:
        raise ConfigError(
            f"-np {ranks} is more than the {there} slots of the allocation ({allocation.describe()}); ask the "
            "scheduler for more, or add --oversubscribe"
        )
    first = next(iter(slots))
    where = f"--hostfile {spec.hostfile}" if spec.hostfile else f"-H {spec.hosts}"
    count = slots[first] + ranks - there
    example = f"{first} slots={count}" if spec.hostfile else f"-H {first}:{count}" + ",..." * (len(slots) > 1)
    raise ConfigError(
        f"-np {ranks} is more than the {there} slots of {where}; give more, as in {example}, start fewer ranks, or add "
        "--oversubscribe"
    )


def _startable(program: tuple[str, ...], *, checks: bool) -> tuple[str, ...]:
    """Return the program for mpirun; a script of Python that is no command runs under this Python.

    Args:
        program: program and its arguments.
        checks: whether mpirun, too, looks for the program on this host.

    Raises:
        ConfigError: there is no such program.
    """
    name = program[0]
    is_path = os.sep in name
    is_here = os.path.isfile(name)
    if name.endswith(".py") and is_here and not (is_path and os.access(name, os.X_OK) and _names_interpreter(name)):
        return sys.executable, *program
    if not checks or shutil.which(name) is not None:
        return program
    if is_here:
        raise ConfigError(f"{name} can be read, but not run: chmod +x {name}, or put its interpreter in front")
    raise ConfigError(f"{name} is a folder, and no program" if os.path.isdir(name) else f"there is no program {name}")


def _names_interpreter(name: str) -> bool:
    try:
        with open(name, "rb") as file:
            return file.read(2) == b"#!"
    except OSError:  # running it will show why
        return True


def make_folder(spec: LaunchSpec) -> None:
    """Make the folder of the ranks' files here, so that users see an error of it once.

    Raises:
        ConfigError: nothing can be written there.
    """
    if spec.folder is None:
        return
    folder = Path(spec.folder)
    try:
        own_folder(folder)
        require_writable(folder / "rank-0.log")
    except OSError as error:
        if isinstance(error, PermissionError) and error.errno is None:  # it is not ours
            raise ForeignFileError(f"--log-dir: {error}; or name another folder") from None
        raise ConfigError(f"--log-dir {folder}: cannot write there: {error.strerror}") from None


def _require_room(ranks: int) -> None:
    """Raise a `ConfigError` if this machine cannot run so many processes."""
    mine, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    limits = {"ulimit -u": mine} if mine != resource.RLIM_INFINITY else {}
    for name in ("pid_max", "threads-max"):
        with suppress(OSError, ValueError):
            limits[f"/proc/sys/kernel/{name}"] = int(Path("/proc/sys/kernel", name).read_text())
    name, most = min(limits.items(), key=lambda each: each[1], default=("", ranks))
    if ranks > most:
        raise ConfigError(f"{ranks} ranks are more than the {most} processes that this machine allows ({name})")


def _require_ob1(environ: Mapping[str, str]) -> None:
    """Raise a `ConfigError` if Open MPI is set to send messages by a transport that does not survive deaths."""
    pml = environ.get("OMPI_MCA_pml", "")
    mtl = environ.get("OMPI_MCA_mtl", "")
    names = pml.removeprefix("^").split(",")
    refused = f"OMPI_MCA_pml={pml}" if pml and ("ob1" in names) is pml.startswith("^") else ""
    if not refused and mtl and not mtl.startswith("^"):
        refused = f"OMPI_MCA_mtl={mtl}"
    if refused:
        raise ConfigError(
            f"{refused} in the environment: ranks survive others only with Open MPI's ob1, and it takes no mtl; unset "
            "it, or set OMPI_MCA_pml=ob1, and OMPI_MCA_btl where a network needs one of its own"
        )
