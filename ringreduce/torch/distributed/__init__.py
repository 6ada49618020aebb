"""The backend of torch.distributed, and DistributedDataParallel on it."""
