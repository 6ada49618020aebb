"""Collectives that programs call by name, in any framework: requests, handles, objects, parameters."""
