"""What is found below ``horovod.common``: what Horovod's bindings for all frameworks have in common."""
