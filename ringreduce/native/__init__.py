"""Compiled loops: what waits, adds and copies on a node, as machine code that Numba has made of Python.

`loops.py` and `kernels.py` are the Python of these loops, and `layout.py` says what they find where. `object_code.py`
compiles them once a machine, and `library.py` loads the result: a process that only runs it never imports Numba.
NumPy's path is the reference: it has the same protocol in shared memory and gives the same bits, and it is there where
this is not.
"""
