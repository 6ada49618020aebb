"""GPUs, NCCL and streams of torch that are not there: doubles for the tests of what uses them."""
