"""The exceptions that Horovod scripts catch."""

from ringreduce.common.errors import CollectiveError
from ringreduce.elastic import HostsUpdatedInterrupt as HostsUpdatedInterrupt

HorovodInternalError = CollectiveError


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """Return a sentence for `HorovodVersionMismatchError`."""
    return f"{name} {version} is installed, and not {installed_version}, which this was built for"


class HorovodVersionMismatchError(ImportError):
    """A framework is not the one that Horovod was compiled for. Nothing raises it here: nothing is compiled.

    Args:
        name: of the framework, also an attribute; so are the others.
        version: that is installed now.
        installed_version: that was installed at the time of the build.
    """

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version), name=name)
        self.version = version
        self.installed_version = installed_version
