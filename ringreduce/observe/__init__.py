"""What is seen of a rank from outside: its trace, its metrics, the record of its run, what it does now and did last."""
