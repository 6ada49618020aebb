"""What is found below ``horovod.data``: loaders that read batches ahead."""

from ringreduce.horovod.data.data_loader_base import AsyncDataLoaderMixin, BaseDataLoader

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]
