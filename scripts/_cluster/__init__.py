"""The parts of `scripts/cluster`: links, machines on them, and what runs on these."""
