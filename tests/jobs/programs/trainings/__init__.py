"""Random trainings, each compared with one process that has the data of all ranks."""

#: What is drawn for a job, and the variable that says so.
OF_JOBS = {"check": "RINGREDUCE_CHECK", "deterministic": "RINGREDUCE_DETERMINISTIC", "key": "RINGREDUCE_KEY_FILE"}
#: What has hidden faults: each is to be drawn often. Counted is how many trainings it was drawn for, or how many times.
SOUGHT = (
    *OF_JOBS,
    *("stop", "freeze", "split updates", "Muon", "wire format", "scaler", "process set", "nested state"),
    *("another way", "checkpoint", "DDP", "FSDP2", "helper twice", "model.save"),
)
