"""The job of Spark whose tasks hold slots for ranks, and what it needs of the cluster."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from ringreduce.common.errors import CollectiveError, ConfigError
from ringreduce.engines import engine

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import DataFrame

_LOOK_EVERY_S = 0.2
#: What Spark's job gets to end once its tasks have, and once it was cancelled.
_TO_RETURN_S = 1.0
_END_S = 10.0
#: Settings of Spark that do not go together with ranks, and why.
_REFUSED = {
    "spark.dynamicAllocation.enabled": "it takes executors away, and with them ranks, and adds some that have none",
    "spark.speculation": "it starts second copies of slow tasks, and ranks are in one only",
}


def context_for(rows: DataFrame | None) -> SparkContext:
    """Return the SparkContext, with settings that ranks can live with.

    Raises:
        ConfigError: there is none, its settings are others, or the rows are no DataFrame.
    """
    pyspark = engine("pyspark", "spark")
    context = pyspark.SparkContext._active_spark_context
    if context is None or context._jsc is None:
        raise ConfigError(
            "there is no SparkContext: ringreduce.spark takes the one of this process, as "
            "SparkSession.builder.getOrCreate() starts it; not one that was stopped, nor a session of Spark Connect"
        )
    if rows is not None and not isinstance(rows, pyspark.sql.DataFrame):
        raise ConfigError(f"rows takes a DataFrame of Spark, not {rows!r}")
    for name, why in _REFUSED.items():
        if context.getConf().get(name, "false").lower() == "true":
            raise ConfigError(f"ringreduce.spark does not go together with {name}=true: {why}")
    return context


def wait_for_cores(context: SparkContext, num_proc: int, deadline: float) -> None:
    """Wait until the cluster can run so many tasks at a time.

    Raises:
        ConfigError: it cannot, at that time.
    """
    scala = context._jsc.sc()
    # As Spark asks itself before a barrier stage; executors may be starting.
    while (most := scala.maxNumConcurrentTasks(scala.resourceProfileManager().defaultResourceProfile())) < num_proc:
        if time.monotonic() > deadline:
            raise ConfigError(
                f"{num_proc} ranks take as many tasks at a time, and this Spark cluster runs {most}: its cores, "
                "divided by spark.task.cpus"
            )
        time.sleep(_LOOK_EVERY_S)  # Spark says nothing when executors have come


class TasksOfRanks:
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

    def look(self, lost: Sequence[str] = ()) -> None:
        """Raise why the job has ended, or those tasks have that are lost."""
        if lost:
            self._thread.join(_END_S)  # it says why
        if self._error is not None:
            raise CollectiveError(f"the job of Spark has failed: {first_line(self._error)}") from self._error
        if lost:
            raise CollectiveError(f"tasks of Spark have ended, and with them ranks: {', '.join(lost)}")
        if self._has_ended:
            raise CollectiveError("the job of Spark has ended, and with it all tasks that hold slots for ranks")

    def end(self) -> None:
        """Wait for the end of the job, whose tasks have ended; cancel it if it goes on, as Spark may run them again."""
        self._thread.join(_TO_RETURN_S)
        if self._thread.is_alive() and self._context._jsc is not None:
            with suppress(Exception):  # as if the context is stopped meanwhile
                self._context.cancelJobGroup(self._name)
        self._thread.join(_END_S)


def first_line(error: BaseException) -> str:
    """Return the first line of the message of an error of Spark, which has Java's stack below."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
