"""Actors of Ray that are the ranks of a job, and keep their state from call to call.

mpirun starts a stand-in for each; see `ringreduce.launcher.stand_ins`.
"""

from __future__ import annotations

import atexit
import importlib
import os
import queue
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from io import BufferedRWPair
from typing import Any, NamedTuple

from ringreduce.common.errors import CollectiveError, ConfigError
from ringreduce.common.processes import pid_namespace
from ringreduce.engines import engine, job_line
from ringreduce.engines.slots import hold, slots
from ringreduce.launcher.agent_server import agent_server, private_folder, worker_environment
from ringreduce.launcher.call_server import VARIABLE, requests_served
from ringreduce.launcher.function import begin, end
from ringreduce.launcher.stand_ins import LEAVE, become

__all__ = ["ExecutorSettings", "RayExecutor"]

#: What gives Horovod's names to a process that imports it: ranks do, if the program has.
_HOROVOD = "ringreduce.horovod"
_LOOK_EVERY_S = 0.2
#: What ranks get to return or fail as well once one has failed, and the job to end once its ranks leave.
_AFTER_FAILURE_S = 5.0
_TO_LEAVE_S = 15.0


class ExecutorSettings(NamedTuple):
    """See `RayExecutor.create_settings`."""

    timeout_s: float = 60.0
    placement_group_timeout_s: float = 100.0


class _ActorPlace(NamedTuple):
    """Where an actor is: Ray's name for the node, its address, the process, whose numbers those are, and its GPUs."""

    node: str
    host: str
    pid: int
    pids: str
    gpus: list[str]


@dataclass
class _StandIn:
    """A process in a rank's place, as the program has it."""

    rank: int
    host: str
    pids: str
    said: dict[str, str]
    stream: BufferedRWPair
    actor: Any = None


class _RankActor:
    """The actor. What it is given is unpickled when a method runs."""

    def where(self) -> _ActorPlace:
        ray = engine("ray", "ray")
        context = ray.get_runtime_context()
        gpus = [str(each) for each in context.get_accelerator_ids().get("GPU", [])]
        address = ray.util.get_node_ip_address()
        return _ActorPlace(context.get_node_id(), address, os.getpid(), pid_namespace(), gpus)

    def become(self, environ: Mapping[str, str], modules: Sequence[str]) -> None:
        """Be the rank that mpirun has said this to."""
        become(environ)
        for name in modules:
            importlib.import_module(name)

    def make(self, cls: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._executable = cls(*args, **kwargs)

    def call(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return fn(*args, **kwargs)

    def execute(self, fn: Callable[[Any], Any]) -> Any:
        return fn(getattr(self, "_executable", None))


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
        num_workers: how many ranks, on as few nodes as may be; or give ``num_hosts``.
        num_hosts, num_workers_per_host: so many nodes, and so many ranks on each.
        cpus_per_worker: cores of each.
        use_gpu: whether each has ``gpus_per_worker`` GPUs (1). It sees those of all ranks of its node, in the order of
            local ranks, so that ``torch.cuda.set_device(hvd.local_rank())`` means its own.
        min_workers: of an elastic job: fewer ranks end it.
        elastic: whether ranks that die are survived, if what runs trains by `ringreduce.elastic.run`.
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
        self._elastic = elastic or min_workers is not None
        least = () if min_workers is None else (f"--min-np={min_workers}",)
        self._options = (*(("--elastic",) if self._elastic else ()), *least, *options)
        self._at_end: ExitStack | None = None
        self._stand_ins: dict[int, _StandIn] = {}
        self._job_ended = threading.Event()
        self._is_leaving = False

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
            ConfigError: Ray has no room, or ranks cannot start there.
            CollectiveError: ``executable_cls`` failed on a rank, or one died.
        """
        if self._at_end is not None:
            raise ConfigError("the executor has been started; shut it down first")
        ray = engine("ray", "ray")
        if ray.util.client.ray.is_connected():
            raise ConfigError("RayExecutor runs on a node of the cluster, not over ray://: start it in a task or a job")
        self._job_ended.clear()
        self._is_leaving = False
        with ExitStack() as at_end:
            actors = self._actors(ray, at_end)
            try:
                found = ray.get([each.where.remote() for each in actors], timeout=self._settings.timeout_s)
            except ray.exceptions.RayError as error:
                raise ConfigError(f"actors of Ray cannot start: {' '.join(str(error).split())}") from None
            places = dict(zip(actors, found, strict=True))
            self._stand_ins = self._hand_over(ray, places, at_end)
            self._at_end = at_end.pop_all()
        atexit.register(self.shutdown)
        try:
            self._prepare(places, extra_env_vars or {})
            if executable_cls is not None:
                call = executable_cls, tuple(executable_args or ()), dict(executable_kwargs or {})
                self._results({each.actor.make.remote(*call): rank for rank, each in self._stand_ins.items()})
        except BaseException:
            self._end(in_order=False)
            raise

    def _prepare(self, places: Mapping[Any, _ActorPlace], variables: Mapping[str, str]) -> None:
        """Make the actors ranks."""
        gpus: dict[str, list[str]] = {place.host: [] for place in places.values()}
        for each in self._stand_ins.values():
            gpus[each.host] += places[each.actor].gpus
        modules = [name for name in (_HOROVOD,) if name in sys.modules]
        calls = {}
        for rank, each in self._stand_ins.items():
            seen = {"CUDA_VISIBLE_DEVICES": ",".join(gpus[each.host])} if gpus[each.host] else {}
            calls[each.actor.become.remote({**variables, **seen, **each.said}, modules)] = rank
        self._results(calls)

    def _actors(self, ray: Any, at_end: ExitStack) -> list[Any]:
        """Return actors in a placement group of their own."""
        groups = importlib.import_module("ray.util.placement_group")
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        bundle = {name: count * self._per_bundle for name, count in self._resources.items()}
        bundles = [bundle] * (self.num_workers // self._per_bundle)
        group = groups.placement_group(bundles, strategy=self._strategy)
        at_end.callback(groups.remove_placement_group, group)
        if not group.wait(self._settings.placement_group_timeout_s):
            raise ConfigError(
                f"Ray had no room for {len(bundles)} times {bundle} ({self._strategy}) within "
                f"{self._settings.placement_group_timeout_s:g} s; the cluster has {ray.cluster_resources()}, of which "
                f"{ray.available_resources()} is free"
            )
        cores = self._resources["CPU"]
        gpus = self._resources.get("GPU", 0)
        made = []
        for index in range(self.num_workers):
            where = strategies.PlacementGroupSchedulingStrategy(group, index // self._per_bundle)
            options = {"num_cpus": cores, "num_gpus": gpus, "scheduling_strategy": where}
            made.append(ray.remote(_RankActor).options(**options).remote())
            at_end.callback(ray.kill, made[-1])
        return made

    def _hand_over(self, ray: Any, places: Mapping[Any, _ActorPlace], at_end: ExitStack) -> dict[int, _StandIn]:
        """Start the job, and return its stand-ins, by rank, each with an actor of its host."""
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        nodes = {place.host: place.node for place in places.values()}

        address = ray.util.get_node_ip_address()
        held, ticket = at_end.enter_context(slots(address))

        def start(host: str, command: str) -> int:
            where = strategies.NodeAffinitySchedulingStrategy(nodes[host], soft=False)
            task = ray.remote(hold).options(num_cpus=0, max_retries=0, scheduling_strategy=where).remote(ticket, host)
            held.wait([host], self._settings.timeout_s, lambda: ray.get(ray.wait([task], timeout=0)[0]))
            return held.start(host, command)

        came: queue.Queue[_StandIn] = queue.Queue()

        def offer(request: dict[str, Any], stream: BufferedRWPair) -> None:
            if self._at_end is not None:  # the launcher begins the job again, as a host was lost: actors cannot
                self._job_ended.set()
                return
            rank = int(request["environ"]["OMPI_COMM_WORLD_RANK"])
            each = _StandIn(rank, request["host"], request["pids"], request["environ"], stream)
            came.put(each)
            stream.read(1)  # it has ended
            if each.actor is not None and not self._is_leaving:  # MPI counts this rank as dead
                ray.kill(each.actor)

        folder = at_end.enter_context(private_folder())
        environ = at_end.enter_context(agent_server(start, folder))
        where = at_end.enter_context(requests_served(address, offer))
        horovod = ["--horovod-variables"] if _HOROVOD in sys.modules else []
        hosts = Counter(place.host for place in places.values())
        line = job_line(hosts, [*horovod, *self._options], "ringreduce.launcher.stand_ins", "stand_in")
        self._begin_job(line, {**environ, "TMPDIR": str(folder), **worker_environment(address), VARIABLE: where}, at_end)
        deadline = time.monotonic() + self._settings.timeout_s
        found: dict[int, _StandIn] = {}
        free = dict(places)
        while len(found) < len(places):
            with suppress(queue.Empty):
                each = came.get(timeout=_LOOK_EVERY_S)
                each.actor = next(actor for actor, place in free.items() if place.host == each.host)
                if free[each.actor].pids != each.pids:
                    raise ConfigError(f"actors on {each.host} are in a container, where ringreduce cannot start ranks")
                each.stream.write(b"%d\n" % free.pop(each.actor).pid)
                each.stream.flush()
                found[each.rank] = each
            if self._job_ended.is_set():
                raise ConfigError("the launcher of the ranks has ended; its output says why")
            if time.monotonic() > deadline:
                missing = sorted(range(len(places)) - found.keys())
                raise ConfigError(f"ranks {missing} have not started within {self._settings.timeout_s:g} s")
        return dict(sorted(found.items()))

    def _begin_job(self, line: Sequence[str], environ: Mapping[str, str], at_end: ExitStack) -> None:
        """Start mpirun, on a thread that lives until it ends."""
        begun: queue.Queue[Any] = queue.Queue()

        def run() -> None:
            job = begin(line, environ)
            begun.put(job)
            job.wait()
            self._job_ended.set()

        threading.Thread(target=run, name="ringreduce runs mpirun", daemon=True).start()
        at_end.callback(end, begun.get())

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
        return list(self._results(self._calls(fn, args, kwargs)).values())

    def run_remote(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Begin to call a function on all ranks, and return their object references, for `ray.get`."""
        return list(self._calls(fn, args, kwargs))

    def _calls(self, fn: Callable[..., Any], args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None) -> Any:
        ray = self._require_started()
        given = [ray.put(tuple(args or ())), ray.put(dict(kwargs or {}))]  # once for all ranks of a node
        return {each.actor.call.remote(fn, *given): rank for rank, each in self._stand_ins.items()}

    def execute(self, fn: Callable[[Any], Any]) -> list[Any]:
        """Call a function with the ``executable_cls`` of each rank; see `run`."""
        self._require_started()
        calls = {each.actor.execute.remote(fn): rank for rank, each in self._stand_ins.items()}
        return list(self._results(calls).values())

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Call a function with the ``executable_cls`` of the first rank, and return what it returns; see `run`."""
        self._require_started()
        rank, first = next(iter(self._stand_ins.items()))
        return self._results({first.actor.execute.remote(fn): rank})[rank]

    def _require_started(self) -> Any:
        if self._at_end is None:
            raise ConfigError("the executor is not started, or was shut down, as after the death of a rank")
        return engine("ray", "ray")

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
                if failed or (died and not self._elastic) or self._job_ended.is_set():
                    until = min(until, time.monotonic() + _AFTER_FAILURE_S)
        except BaseException:  # an interrupt: ranks may be at anything
            self._end(in_order=False)
            raise
        for rank in died:
            del self._stand_ins[rank]
        survived = self._elastic and not failed and not left and self._stand_ins
        if left or (died and not survived) or self._job_ended.is_set():
            self._end(in_order=False)
        size = self.num_workers
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
        with at_end:
            self._is_leaving = True
            if in_order:
                for each in self._stand_ins.values():
                    with suppress(OSError):
                        each.stream.write(LEAVE)
                        each.stream.flush()
                    each.actor.__ray_terminate__.remote()  # so that what is registered for its exit runs
                self._job_ended.wait(_TO_LEAVE_S)
            self._stand_ins = {}


def _traceback(error: Any) -> str:
    """Return the traceback in an error of Ray, without Ray's heading and colours."""
    lines = re.sub("\x1b\\[[0-9;]*m", "", getattr(error, "traceback_str", str(error))).splitlines()
    first = next((at for at, line in enumerate(lines) if line.startswith("  File ")), None)
    return "\n".join(lines if first is None else ["Traceback (most recent call last):", *lines[first:]])
