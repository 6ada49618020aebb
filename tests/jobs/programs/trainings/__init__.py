"""Random trainings, each compared with one process that has the data of all ranks."""
