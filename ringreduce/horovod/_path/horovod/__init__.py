"""Stands in for `ringreduce.horovod` where its import hook is not installed yet, and installs it."""

import sys

del sys.modules[__name__]  # or it would be taken for Horovod itself

import ringreduce.horovod  # noqa: E402

sys.modules[__name__] = ringreduce.horovod
