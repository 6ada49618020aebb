"""Actors of Ray that are the ranks of a job, and keep their state from call to call.

mpirun starts a stand-in for each; see `ringreduce.launcher.stand_ins`.
"""

from __future__ import annotations

import atexit
import importlib
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from ringreduce.common.errors import CollectiveError, ConfigError
from ringreduce.engines import engine, job_line, on_hosts, refuse_key
from ringreduce.engines.ray_ranks import BeginsAgainError, RankActor, StandIn, StandIns
from ringreduce.engines.ray_room import Room, room
from ringreduce.launcher.agent_server import TICKET, agent_server, worker_environment
from ringreduce.launcher.function import begin, end
from ringreduce.launcher.stand_ins import LEAVE, STAND_IN

if TYPE_CHECKING:
    import subprocess

#: What gives Horovod's names to a process that imports it: ranks do, if the program has.
_HOROVOD = "ringreduce.horovod"
_LOOK_EVERY_S = 0.2
#: What ranks get to return or fail as well once one has failed, and the job to end once its ranks leave.
_AFTER_FAILURE_S = 5.0
_TO_LEAVE_S = 15.0
#: What the processes of actors get to end once Ray says that these have.
_TO_EXIT_S = 60.0


class ExecutorSettings(NamedTuple):
    """See `RayExecutor.create_settings`."""

    timeout_s: float = 60.0
    placement_group_timeout_s: float = 100.0


class RayExecutor:
    """Ranks that are actors of Ray, in a placement group; with Horovod's methods.

    The program is a driver of Ray, a task or an actor, on a node of the cluster. Each node has ringreduce and the same
    Open MPI at the same path. ::

        executor = RayExecutor(num_workers=4)
        executor.start()
        losses = executor.run(train, args=[0.1])
        executor.shutdown()

    Args:
        settings: those of `create_settings`.
        num_workers: number of ranks, on as few nodes as possible; or give ``num_hosts``. Elastic jobs start with up to
            ``max_workers`` if Ray has room for them.
        num_hosts, num_workers_per_host: so many nodes, and so many ranks on each.
        cpus_per_worker: cores of each.
        use_gpu: whether each has ``gpus_per_worker`` GPUs (1). It sees those of all ranks of its node, in the order of
            local ranks, so that ``torch.cuda.set_device(hvd.local_rank())`` means its own.
        min_workers: of an elastic job: fewer ranks end it.
        max_workers: of an elastic job: it grows to so many as Ray gets room for them; None: not above the first number.
        elastic: whether ranks and nodes that die are survived, and replaced, if what runs trains by
            `ringreduce.elastic.run`.
        options: more options of ``ringreduce run``.

    Raises:
        ConfigError: arguments are missing or wrong.
    """

    def __init__(
        self,
        settings: Any = None,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: int = 1,
        use_gpu: bool = False,
        gpus_per_worker: int | None = None,
        min_workers: int | None = None,
        max_workers: int | None = None,
        *,
        elastic: bool = False,
        options: Sequence[str] = (),
    ) -> None:
        if (num_workers is None) == (num_hosts is None):
            raise ConfigError("RayExecutor takes num_workers, or num_hosts and num_workers_per_host")
        if gpus_per_worker and not use_gpu:
            raise ConfigError("RayExecutor: gpus_per_worker takes use_gpu=True")
        self.num_workers = num_hosts * num_workers_per_host if num_hosts is not None else num_workers or 0
        if self.num_workers < 1:
            raise ConfigError(f"RayExecutor starts at least one rank, not {self.num_workers}")
        self._settings = settings or ExecutorSettings()
        self._per_bundle = num_workers_per_host if num_hosts is not None else 1
        self._strategy = "PACK" if num_hosts is None else "STRICT_SPREAD"
        self._resources = {"CPU": float(cpus_per_worker), **({"GPU": float(gpus_per_worker or 1)} if use_gpu else {})}
        self._elastic = elastic or min_workers is not None or max_workers is not None
        self._most = self.num_workers if max_workers is None else max_workers
        if self._most < self.num_workers:
            raise ConfigError(
                f"RayExecutor: max_workers={self._most} is less than the {self.num_workers} ranks at first"
            )
        least = [] if min_workers is None else [f"--min-np={min_workers}"]
        self._options = [*(["--elastic", f"--max-np={self._most}", *least] if self._elastic else ()), *options]
        self._at_end: ExitStack | None = None
        self._ranks: dict[int, StandIn] = {}
        self._room: Room

    @staticmethod
    def create_settings(timeout_s: float = 60.0, placement_group_timeout_s: float = 100.0) -> ExecutorSettings:
        """Return settings.

        Args:
            timeout_s: seconds in which ranks have to start.
            placement_group_timeout_s: seconds to wait for the cores and GPUs.
        """
        return ExecutorSettings(timeout_s, placement_group_timeout_s)

    def __enter__(self) -> RayExecutor:
        if self._at_end is None:
            self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def start(
        self,
        executable_cls: Callable[..., Any] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Start the ranks.

        Args:
            executable_cls: each rank makes one of these, which `execute` hands to functions.
            executable_args, executable_kwargs: its arguments.
            extra_env_vars: variables for the ranks.

        Raises:
            ModuleNotFoundError: Ray is not installed.
            ConfigError: Ray has no room, ranks cannot start there, or they are to encrypt (see docs/security.md).
            CollectiveError: ``executable_cls`` failed on a rank, or one died.
        """
        if self._at_end is not None:
            raise ConfigError("the executor has been started; shut it down first")
        refuse_key(self._options, extra_env_vars or ())
        ray = engine("ray", "ray")
        if ray.util.client.ray.is_connected():
            raise ConfigError("RayExecutor runs on a node of the cluster, not over ray://: start it in a task or a job")
        self._stand_ins = StandIns()
        self._variables = extra_env_vars or {}
        self._executable: tuple[Any, ...] | None = None
        if executable_cls is not None:
            self._executable = executable_cls, tuple(executable_args or ()), dict(executable_kwargs or {})
        with ExitStack() as at_end:
            self._room = at_end.enter_context(
                room(
                    ray,
                    {name: count * self._per_bundle for name, count in self._resources.items()},
                    self._per_bundle,
                    count=self.num_workers // self._per_bundle,
                    strategy=self._strategy,
                    limit_s=self._settings.placement_group_timeout_s,
                )
            )
            self._begin_job(at_end)
            self._at_end = at_end.pop_all()
        atexit.register(self.shutdown)
        self._begin_ranks()

    def _begin_job(self, at_end: ExitStack) -> None:
        """Start the launcher, on a thread that lives until it ends."""
        folder = self._room.slots.folder
        hosts = self._room.wait(self._settings.timeout_s)
        if self._elastic:
            for _ in range((self._most - self.num_workers) // self._per_bundle):
                self._room.take(1)
            listing = at_end.enter_context(self._room.listed(folder))
            options = ["-np", str(self.num_workers), "--host-discovery-script", str(listing)]
        else:
            options = on_hosts(hosts)
        horovod = ["--horovod-variables"] if _HOROVOD in sys.modules else []
        line = job_line([*options, *horovod, *self._options], "ringreduce.launcher.stand_ins", "stand_in")
        environ = at_end.enter_context(agent_server(self._room.start, folder))
        self._room.slots.answers[STAND_IN] = self._stand_ins.offer
        environ |= {"TMPDIR": str(folder), **worker_environment(self._room.address), TICKET: self._room.slots.ticket}
        begun: Future[subprocess.Popen[bytes]] = Future()
        stand_ins = self._stand_ins

        def run() -> None:
            try:
                job = begin(line, environ)
            except BaseException as error:
                begun.set_exception(error)
                return
            begun.set_result(job)
            job.wait()
            stand_ins.end()

        threading.Thread(target=run, name="ringreduce runs mpirun", daemon=True).start()
        at_end.callback(end, begun.result())

    def _begin_ranks(self) -> None:
        """Make new actors the ranks of the job that has begun."""
        try:
            while True:
                with suppress(BeginsAgainError):
                    self._ranks = self._stand_ins.take(self._settings.timeout_s)
                    try:
                        self._hand_over()
                    except ConfigError:
                        if self._has_lost_some() and self._stand_ins.begin_again([*self._ranks.values()], _TO_EXIT_S):
                            raise BeginsAgainError from None
                        raise
                    if self._executable is not None:
                        self._results(self._submit("make", *self._executable))
                    return
        except BaseException:
            self._end(in_order=False)
            raise

    def _has_lost_some(self) -> bool:
        """Return whether a rank of an elastic job, or its node, has gone."""
        here = {each.host for each in self._room.places()} if self._elastic else set()
        return self._elastic and any(each.has_ended or each.host not in here for each in self._ranks.values())

    def _hand_over(self) -> None:
        """Make actors, and have each be the rank of a stand-in.

        Raises:
            ConfigError: they cannot start.
        """
        ray = engine("ray", "ray")
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        cores = self._resources["CPU"]
        free = self._room.places()
        for each in self._ranks.values():
            place = next((place for place in free if place.host == each.host), None)
            if place is None:
                raise ConfigError(f"Ray has taken the room for rank {each.rank} on {each.host} away")
            free.remove(place)
            where = strategies.PlacementGroupSchedulingStrategy(place.group, place.bundle)
            options = {"num_cpus": cores, "num_gpus": self._resources.get("GPU", 0), "scheduling_strategy": where}
            each.actor = ray.remote(RankActor).options(**options).remote()
            each.kill_actor()  # the stand-in may have ended when there was none
        asked = [each.actor.process.remote() for each in self._ranks.values()]
        try:
            processes = ray.get(asked, timeout=self._settings.timeout_s)
        except ray.exceptions.RayError as error:
            raise ConfigError(f"actors of Ray cannot start: {' '.join(str(error).split())}") from None
        gpus: dict[str, list[str]] = {each.host: [] for each in self._ranks.values()}
        for each, process in zip(self._ranks.values(), processes, strict=True):
            if process.pids != each.pids:
                raise ConfigError(f"actors on {each.host} are in a container, where ringreduce cannot start ranks")
            gpus[each.host] += process.gpus
            with suppress(OSError):  # the job has ended already
                each.connection.send_json(process.pid)
        modules = [name for name in (_HOROVOD,) if name in sys.modules]
        calls = {}
        for rank, each in self._ranks.items():
            seen = {"CUDA_VISIBLE_DEVICES": ",".join(gpus[each.host])} if gpus[each.host] else {}
            calls[each.actor.become.remote({**self._variables, **seen, **each.said}, modules)] = rank
        self._results(calls)

    def run(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Call a function on all ranks, at the same time.

        Returns:
            What it returned, in the order of the ranks; of an elastic job, on those that live.

        Raises:
            CollectiveError: it failed on a rank, whose traceback is in the message; or one died. The executor goes on
                if all ranks have returned or failed within seconds; else it is shut down.
            ConfigError: the executor is not started.
        """
        return list(self._call("call", fn, *self._given(args, kwargs)).values())

    def run_remote(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Begin to call a function on all ranks, and return their object references, for `ray.get`.

        Where an elastic job begins again, these fail: `run` calls the function on the new ranks.
        """
        return list(self._submit("call", fn, *self._given(args, kwargs)))

    def _given(self, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None) -> list[Any]:
        ray = self._require_started()
        return [ray.put(tuple(args or ())), ray.put(dict(kwargs or {}))]  # once for all ranks of a node

    def execute(self, fn: Callable[[Any], Any]) -> list[Any]:
        """Call a function with the ``executable_cls`` of each rank; see `run`."""
        self._require_started()
        return list(self._call("execute", fn).values())

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Call a function with the ``executable_cls`` of the first rank, and return what it returns; see `run`."""
        self._require_started()
        return next(iter(self._call("execute", fn, count=1).values()))

    def _call(self, method: str, *args: Any, count: int | None = None) -> dict[int, Any]:
        """Call a method of the actors of the first ranks, or all; anew where the job begins again."""
        while True:
            try:
                return self._results(self._submit(method, *args, count=count))
            except BeginsAgainError:
                self._begin_ranks()

    def _submit(self, method: str, *args: Any, count: int | None = None) -> dict[Any, int]:
        ranks = [*self._ranks.items()][:count]
        return {getattr(each.actor, method).remote(*args): rank for rank, each in ranks}

    def _require_started(self) -> Any:
        if self._at_end is None:
            raise ConfigError("the executor is not started, or was shut down, as after the death of a rank")
        ray = engine("ray", "ray")
        if not ray.is_initialized():  # a call would start it anew
            raise ConfigError("the executor's ranks have ended, as Ray was shut down")
        return ray

    def _results(self, calls: Mapping[Any, int]) -> dict[int, Any]:
        """Return by rank what calls return; if they cannot end, shut down.

        Args:
            calls: ranks by object references.
        """
        ray = engine("ray", "ray")
        done: dict[int, Any] = {}
        failed: dict[int, Any] = {}
        died: dict[int, Any] = {}
        left = [*calls]
        present = [*self._ranks.values()]
        until = float("inf")
        try:
            while left and time.monotonic() < until:
                ready, left = ray.wait(left, num_returns=len(left), timeout=_LOOK_EVERY_S)
                for each in ready:
                    try:
                        done[calls[each]] = ray.get(each)
                    except ray.exceptions.RayActorError as error:
                        died[calls[each]] = error
                    except ray.exceptions.RayError as error:
                        failed[calls[each]] = error
                if failed or (died and not self._elastic) or self._stand_ins.are_over(present):
                    until = min(until, time.monotonic() + _AFTER_FAILURE_S)
            survived = self._elastic and done and not failed and not left
            limit_s = _TO_LEAVE_S if died or (left and self._elastic) else 0.0
            limit_s = _TO_EXIT_S if len(died) == len(present) else limit_s
            if not survived and len(done) < len(calls) and self._stand_ins.begin_again(present, limit_s):
                raise BeginsAgainError
        except BeginsAgainError:
            raise
        except BaseException:  # an interrupt: ranks may be at anything
            self._end(in_order=False)
            raise
        size = len(present)
        for rank in died:
            del self._ranks[rank]
        if left or (died and not survived) or self._stand_ins.all_ended.is_set():
            self._end(in_order=False)
        if died and not survived:
            rank, why = next(iter(died.items()))
            raise CollectiveError(f"rank {rank} of {size} has died: {' '.join(str(why).split())}")
        if failed:  # other ranks may have failed because of the first
            lost = [rank for rank, error in failed.items() if type(error.cause).__name__ != "PeerLostError"]
            rank = next(iter([*lost, *failed]))
            raise CollectiveError(f"rank {rank} of {size} failed:\n{_traceback(failed[rank])}")
        if left:
            raise CollectiveError("the job has ended below its ranks; its output says why")
        return dict(sorted(done.items()))

    def shutdown(self) -> None:
        """End all ranks, and leave nothing behind; nothing the second time."""
        self._end(in_order=True)

    def _end(self, *, in_order: bool) -> None:
        at_end = self._at_end
        self._at_end = None
        if at_end is None:
            return
        atexit.unregister(self.shutdown)
        in_order = in_order and engine("ray", "ray").is_initialized()  # else the actors have ended
        with at_end:
            for each in self._ranks.values() if in_order else ():
                each.leaves = True
                with suppress(OSError):
                    each.connection.send_json(LEAVE)
                each.actor.__ray_terminate__.remote()  # so that what is registered for its exit runs
            if in_order:
                self._stand_ins.all_ended.wait(_TO_LEAVE_S)
            self._ranks = {}


def _traceback(error: Any) -> str:
    """Return the traceback in an error of Ray, without Ray's heading and colours."""
    lines = re.sub("\x1b\\[[0-9;]*m", "", getattr(error, "traceback_str", str(error))).splitlines()
    first = next((at for at, line in enumerate(lines) if line.startswith("  File ")), None)
    return "\n".join(lines if first is None else ["Traceback (most recent call last):", *lines[first:]])
