"""What is made of the snapshots of all ranks: one view of a job, and why it is slow or stalls."""
