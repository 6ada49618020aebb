"""The exceptions that Horovod scripts catch."""

from ringreduce.common.errors import CollectiveError as HorovodInternalError
from ringreduce.elastic import HostsUpdatedInterrupt

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt"]
