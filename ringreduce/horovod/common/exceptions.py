"""The exceptions that Horovod scripts catch."""

from ringreduce.elastic import HostsUpdatedInterrupt
from ringreduce.errors import CollectiveError as HorovodInternalError

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt"]
