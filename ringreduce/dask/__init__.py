"""Ranks on the workers of a Dask cluster: `run`. Nothing of Dask is imported before it is called."""

from ringreduce.engines.dask import run

__all__ = ["run"]
