"""Compiled loops: what waits, adds and copies on a node, as machine code.

`loops.py` is Python that Numba compiles, `elementwise.py` writes LLVM, and `layout.py` says what they find where.
`object_code.py` compiles both once a machine, and `library.py` loads the result: a process that only runs it never
imports Numba. NumPy's path is the reference: it gives the same bits, and runs where this is not.
"""
