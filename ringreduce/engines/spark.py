"""Ranks in the tasks of a Spark job; see `run`."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ringreduce.common.errors import CollectiveError, ConfigError
from ringreduce.engines import engine, run_on
from ringreduce.engines.slots import Slots, connection_to_task, hold, slots, why_failed

if TYPE_CHECKING:
    import socket

    import pyarrow
    from pyspark import SparkContext
    from pyspark.sql import DataFrame

__all__ = ["run"]

_T = TypeVar("_T")

_log = logging.getLogger(__name__)

_START_S = 60.0
_LOOK_EVERY_S = 0.2
#: What Spark's job gets to end once its tasks have, and once it was cancelled.
_TO_RETURN_S = 1.0
_END_S = 10.0
#: Settings of Spark that do not go together with ranks, and why.
_REFUSED = {
    "spark.dynamicAllocation.enabled": "it takes executors away, and with them ranks, and adds some that have none",
    "spark.speculation": "it starts second copies of slow tasks, and ranks are in one only",
}
_IN_FILES = "options=['--log-dir=DIR'] writes the output of the ranks to files"
#: What is refused, and why.
_NOT_TAKEN = {
    "stdout": _IN_FILES,
    "stderr": _IN_FILES,
    "prefix_output_with_timestamp": _IN_FILES,
    "executable": "ranks run the Python of their tasks, spark.pyspark.python",
    "--elastic": "Spark ends all tasks of a barrier stage with the first",
}
#: Follows the batches of a partition: a connection that ends before was lost.
_WHOLE = b"."


def run(
    fn: Callable[..., _T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: object = None,
    stderr: object = None,
    verbose: int | None = None,
    nics: str | Sequence[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
    *,
    rows: DataFrame | None = None,
    options: Sequence[str] = (),
) -> list[_T]:
    """Call a function on new ranks, children of the tasks of a Spark job, and wait for them.

    The tasks are a barrier stage: Spark starts all of them, or none, and each holds its slot until the end. Rank i is
    below the task of partition i, and has its environment. The function calls `init` itself. It, its arguments and its
    results go by cloudpickle between the driver and the ranks.

    This is ``horovod.spark.run``, too.

    Args:
        fn: function to call.
        args: its arguments.
        kwargs: its keyword arguments.
        num_proc: number of ranks, at most that of tasks that the cluster runs at a time; None: one for each partition
            of ``rows``, or as many as Spark takes for a job (``spark.default.parallelism``).
        start_timeout: seconds to wait until all tasks have started; None: 60.
        extra_mpi_args: more options for mpirun, as in a shell.
        env: variables for the ranks.
        nics: names of interfaces for messages, a list, or separated by commas.
        verbose: at least 2: write the command to standard error.
        rows: a DataFrame. Each rank gets a partition of it, as the keyword argument ``rows`` of the function: an
            iterator of `pyarrow.RecordBatch`, straight from its task, which can be read once. They are dealt out
            anew over ``num_proc`` partitions, or stay where they are if that is None; and computed first, and kept on
            the executors until the end, so that an error of Spark comes before the ranks start.
        use_mpi, use_gloo: taken for Horovod's sake: it is always MPI.
        stdout, stderr, prefix_output_with_timestamp, executable: refused; see ``options``, which has ``--log-dir=DIR``.
        options: more options of ``ringreduce run``.

    Returns:
        The results of the ranks, in their order.

    Raises:
        ModuleNotFoundError: pyspark, or for ``rows`` pandas or pyarrow, is not installed.
        ConfigError: an argument or a setting of Spark is wrong, there is no SparkContext, or it has not enough slots.
        CollectiveError: Spark cannot compute the rows. Or a rank failed, and ended the job; the message has its
            traceback. Or an executor has ended, or
            somebody has cancelled the job of Spark.
    """
    given = {
        "stdout": stdout,
        "stderr": stderr,
        "prefix_output_with_timestamp": prefix_output_with_timestamp,
        "executable": executable,
        "--elastic": "--elastic" in options,
    }
    for name, value in given.items():
        if value:
            raise ConfigError(f"ringreduce.spark.run takes no {name}: {_NOT_TAKEN[name]}")
    if use_gloo:
        _log.warning("use_gloo has no meaning here: there is only MPI, and no Gloo")
    values = {
        "--mpi-args": extra_mpi_args,
        "--network-interface": nics if nics is None or isinstance(nics, str) else ",".join(nics),
    }
    words = [f"{name}={value}" for name, value in values.items() if value is not None]
    words += ["--verbose"] if (verbose or 0) > 1 else []
    call = (fn, tuple(args), dict(kwargs or {}))
    return _run(call, num_proc, rows, env=env, options=[*words, *options], limit_s=start_timeout or _START_S)


def _run(
    call: tuple[Any, ...],
    num_proc: int | None,
    rows: DataFrame | None,
    *,
    env: Mapping[str, str] | None,
    options: Sequence[str],
    limit_s: float,
) -> list[Any]:
    context = _context(rows)
    if num_proc is None:
        num_proc = context.defaultParallelism if rows is None else rows.rdd.getNumPartitions()
    elif rows is not None and num_proc >= 1:
        rows = rows.repartition(num_proc)
    if not isinstance(num_proc, int) or num_proc < 1:
        raise ConfigError(f"num_proc is the number of ranks, at least 1, not {num_proc!r}")
    with _computed(rows) as rows:
        return _run_in_tasks(context, call, num_proc, rows, env=env, options=options, limit_s=limit_s)


@contextmanager
def _computed(rows: DataFrame | None) -> Iterator[DataFrame | None]:
    """Have the rows computed, and kept on the executors, as long as this context lasts.

    An error of Spark while a task reads looks like the end of its partition there, and the rank would go on without the
    rest.

    Raises:
        CollectiveError: they cannot be computed.
    """
    if rows is None:
        yield None
        return
    was_kept = rows.is_cached  # by the program, and perhaps not computed yet
    kept = rows.persist()
    try:
        try:
            kept.count()
        except Exception as error:
            raise CollectiveError(f"Spark cannot compute the rows: {_first_line(error)}") from error
        yield kept
    finally:
        with suppress(Exception):  # as if the context was stopped meanwhile
            if not was_kept:
                kept.unpersist()


def _run_in_tasks(
    context: SparkContext,
    call: tuple[Any, ...],
    num_proc: int,
    rows: DataFrame | None,
    *,
    env: Mapping[str, str] | None,
    options: Sequence[str],
    limit_s: float,
) -> list[Any]:
    deadline = time.monotonic() + limit_s
    while (most := _most_tasks(context)) < num_proc:  # executors may be starting
        if time.monotonic() > deadline:
            raise ConfigError(
                f"{num_proc} ranks take as many tasks at a time, and this Spark cluster runs {most}: its cores, "
                "divided by spark.task.cpus"
            )
        time.sleep(_LOOK_EVERY_S)  # Spark says nothing when executors have come
    settings = context.getConf()
    address = settings.get("spark.driver.host", "127.0.0.1")
    names = [f"spark-{rank}" for rank in range(num_proc)]
    with slots(address) as (held, ticket):
        job = _TasksOfRanks(context, _work(context, rows, ticket, num_proc))
        try:
            look = partial(job.look, held)
            held.wait(names, max(deadline - time.monotonic(), 1.0), look)
            env = {"OMP_NUM_THREADS": settings.get("spark.task.cpus", "1"), **(env or {})}
            inside = _call if rows is None else _call_with_rows
            hosts = dict.fromkeys(names, 1)
            with why_failed(look):
                results = run_on(held.start, hosts, inside, call, address=address, options=options, env=env)
            look()  # a task that has failed may have given its rank a part of its rows
            return results
        finally:
            held.close()
            job.end()


def _context(rows: DataFrame | None) -> SparkContext:
    """Return the SparkContext, with settings that ranks can live with."""
    pyspark = engine("pyspark", "spark")
    context = pyspark.SparkContext._active_spark_context
    if context is None or context._jsc is None:
        raise ConfigError(
            "there is no SparkContext: ringreduce.spark.run takes the one of this process, as "
            "SparkSession.builder.getOrCreate() starts it; not one that was stopped, nor a session of Spark Connect"
        )
    if rows is not None and not isinstance(rows, pyspark.sql.DataFrame):
        raise ConfigError(f"rows takes a DataFrame of Spark, not {rows!r}")
    for name, why in _REFUSED.items():
        if context.getConf().get(name, "false").lower() == "true":
            raise ConfigError(f"ringreduce.spark.run does not go together with {name}=true: {why}")
    return context


def _most_tasks(context: SparkContext) -> int:
    """Return how many tasks the cluster runs at a time, by what Spark asks itself before a barrier stage."""
    scala = context._jsc.sc()
    return int(scala.maxNumConcurrentTasks(scala.resourceProfileManager().defaultResourceProfile()))


def _work(context: SparkContext, rows: DataFrame | None, ticket: str, num_proc: int) -> Callable[[], object]:
    """Return what runs the tasks that hold the slots."""
    body = partial(_hold, ticket, rows is not None)
    if rows is not None:
        for each in ("pandas", "pyarrow"):  # Spark takes both for that
            engine(each, "spark")
        held: Any = rows.mapInArrow(body, "ended boolean", barrier=True)
    else:
        held = context.parallelize(range(num_proc), num_proc).barrier().mapPartitions(body)
    return lambda: held.count()


class _TasksOfRanks:
    """The job of Spark whose tasks hold the slots, on a thread of its own.

    Args:
        context: of Spark.
        work: runs the tasks.
    """

    def __init__(self, context: SparkContext, work: Callable[[], object]) -> None:
        self._context = context
        self._name = f"ringreduce-{uuid.uuid4().hex[:8]}"
        self._error: BaseException | None = None
        self._has_ended = False
        self._thread = threading.Thread(target=self._work, args=(work,), name=self._name, daemon=True)
        self._thread.start()

    def _work(self, work: Callable[[], object]) -> None:
        try:
            self._context.setJobGroup(self._name, "the ranks of ringreduce")
            work()
        except Exception as error:
            self._error = error
        finally:
            self._has_ended = True

    def look(self, held: Slots) -> None:
        """Raise why tasks have ended, if some have."""
        if held.lost:
            self._thread.join(_END_S)  # it says why
        if self._error is not None:
            raise CollectiveError(f"the job of Spark has failed: {_first_line(self._error)}") from self._error
        if held.lost or self._has_ended:
            raise CollectiveError(f"tasks of Spark have ended, and with them ranks: {', '.join(held.lost)}")

    def end(self) -> None:
        """Wait for the end of the job, whose tasks have ended; cancel it if it goes on, as Spark may run them again."""
        self._thread.join(_TO_RETURN_S)
        if self._thread.is_alive() and self._context._jsc is not None:
            with suppress(Exception):  # as if the context is stopped meanwhile
                self._context.cancelJobGroup(self._name)
        self._thread.join(_END_S)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# ---- in a task ----


def _hold(ticket: str, has_rows: bool, batches: Iterator[Any]) -> Iterator[Any]:
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    hold(ticket, f"spark-{context.partitionId()}", partial(_send, batches if has_rows else iter(())))
    return iter(())


def _send(batches: Iterator[pyarrow.RecordBatch], connection: socket.socket) -> None:
    """Send the batches of a partition: a stream of Arrow, if there are any, and a mark."""
    from pyarrow import ipc

    with connection.makefile("wb") as sink:
        writer = None
        for batch in batches:
            writer = writer or ipc.new_stream(sink, batch.schema)
            writer.write_batch(batch)
        if writer is not None:
            writer.close()
        sink.write(_WHOLE)


# ---- in a rank ----


def _call(fn: Callable[..., _T], args: Sequence[Any], kwargs: Mapping[str, Any]) -> _T:
    return fn(*args, **kwargs)


def _call_with_rows(fn: Callable[..., _T], args: Sequence[Any], kwargs: Mapping[str, Any]) -> _T:
    return fn(*args, rows=_receive(), **kwargs)


def _receive() -> Iterator[pyarrow.RecordBatch]:
    """Yield the batches of the partition.

    Raises:
        CollectiveError: the task has ended before all have come.
    """
    from pyarrow import ipc

    with connection_to_task() as connection, connection.makefile("rb") as source:
        if source.peek(1)[:1] not in (b"", _WHOLE):
            yield from ipc.open_stream(source)
        if source.read(1) != _WHOLE:
            raise CollectiveError("the task of Spark has ended, and not all of its rows have come")
