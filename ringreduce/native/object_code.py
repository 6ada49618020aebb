"""Compiles loops and kernels with Numba into one object file, with functions that Python calls at little cost.

These are of CPython's own kind (``METH_FASTCALL``): they take whole numbers and return one. A call takes
some 35 ns, where one through ctypes takes 250 and one of Numba's 160. A call polls for some time with the interpreter's
lock: to give that back takes another 30 ns and, where other threads compute in Python, milliseconds.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

from ringreduce.common.files import replace_file
from ringreduce.native import loops
from ringreduce.native.catalog import FUNCTIONS
from ringreduce.native.elementwise import emit
from ringreduce.native.layout import LATE_BARRIER, LATE_ENTRY, NOTHING, RELEASES
from ringreduce.native.library import SIMPLE, processor

_DECLARATIONS = """
declare i64 @PyLong_AsLongLong(ptr)
declare ptr @PyLong_FromLongLong(i64)
declare ptr @PyEval_SaveThread()
declare void @PyEval_RestoreThread(ptr)
declare i32 @loop(ptr, ptr, i64, i64, i64, i64, i64)
"""

#: What Python calls to run a plan. The loop gets one argument more: whether it is patient.
_RUN = """
define ptr @{name}(ptr %self, ptr %given, i64 %count) {{
begin:
  %result = alloca i64
  %error = alloca ptr
{arguments}
  %plan = inttoptr i64 %a0 to ptr
  %where = getelementptr i64, ptr %plan, i64 {RELEASES}
  %releases = load i64, ptr %where
  %at_once = icmp ne i64 %releases, 0
  br i1 %at_once, label %patient, label %held
held:
  call i32 @loop(ptr %result, ptr %error, i64 %a0, i64 %a1, i64 {target}, i64 %a3, i64 0)
  %first = load i64, ptr %result
  %entry = icmp eq i64 %first, {LATE_ENTRY}
  %barrier = icmp eq i64 %first, {LATE_BARRIER}
  %is_late = or i1 %entry, %barrier
  br i1 %is_late, label %patient, label %end
patient:
  %phase = phi i64 [ %a3, %begin ], [ %first, %held ]
  %thread = call ptr @PyEval_SaveThread()
  call i32 @loop(ptr %result, ptr %error, i64 %a0, i64 %a1, i64 {target}, i64 %phase, i64 1)
  call void @PyEval_RestoreThread(ptr %thread)
  br label %end
end:
  %code = load i64, ptr %result
  %object = call ptr @PyLong_FromLongLong(i64 %code)
  ret ptr %object
}}
"""
#: Where an array is given in place of the target, it is found there.
_TARGET_OF_ARRAY = """
  %array = inttoptr i64 %a2 to ptr
  %field = getelementptr i8, ptr %array, i64 {offset}
  %memory = load i64, ptr %field"""
#: First with the interpreter's lock, and then, if nothing has come, patiently without it.
_TAKE = """
declare i32 @loop_take(ptr, ptr, i64, i64)
define ptr @take(ptr %self, ptr %given, i64 %count) {{
begin:
  %result = alloca i64
  %error = alloca ptr
{arguments}
  call i32 @loop_take(ptr %result, ptr %error, i64 %a0, i64 0)
  %first = load i64, ptr %result
  %is_late = icmp eq i64 %first, {NOTHING}
  br i1 %is_late, label %patient, label %end
patient:
  %thread = call ptr @PyEval_SaveThread()
  call i32 @loop_take(ptr %result, ptr %error, i64 %a0, i64 1)
  call void @PyEval_RestoreThread(ptr %thread)
  br label %end
end:
  %code = load i64, ptr %result
  %object = call ptr @PyLong_FromLongLong(i64 %code)
  ret ptr %object
}}
"""
#: With the interpreter's lock, or without.
_CALL = """
declare i32 @loop_{name}(ptr, ptr, {types})
define ptr @{name}(ptr %self, ptr %given, i64 %count) {{
  %result = alloca i64
  %error = alloca ptr
{arguments}
  {before}
  call i32 @loop_{name}(ptr %result, ptr %error, {numbers})
  {after}
  %code = load i64, ptr %result
  %object = call ptr @PyLong_FromLongLong(i64 %code)
  ret ptr %object
}}
"""


def _arguments(count: int) -> str:
    """Return the LLVM that makes numbers of arguments."""
    return "\n".join(
        f"  %p{i} = getelementptr ptr, ptr %given, i64 {i}\n"
        f"  %o{i} = load ptr, ptr %p{i}\n"
        f"  %a{i} = call i64 @PyLong_AsLongLong(ptr %o{i})"
        for i in range(count)
    )


def _functions(codecs: Sequence[str]) -> str:
    """Return the LLVM of the functions that Python calls, with these codecs."""
    constants = {"RELEASES": RELEASES, "LATE_ENTRY": LATE_ENTRY, "LATE_BARRIER": LATE_BARRIER}
    of_array = _arguments(4) + _TARGET_OF_ARRAY.format(offset=object.__basicsize__)
    return "".join(
        (
            _DECLARATIONS,
            _RUN.format(name="run", arguments=_arguments(4), target="%a2", **constants),
            _RUN.format(name="run_into", arguments=of_array, target="%memory", **constants),
            *(_call(name, 1) for name in ("is_same", "put")),
            _TAKE.format(arguments=_arguments(1), NOTHING=NOTHING),
            *(_call(name, 3 if name.startswith("encode") else 4, releases=True) for name in codecs),
        )
    )


def _call(name: str, count: int, *, releases: bool = False) -> str:
    """Return the LLVM of a function of so many numbers; ``releases``: the interpreter's lock meanwhile."""
    return _CALL.format(
        name=name,
        arguments=_arguments(count),
        types=", ".join(["i64"] * count),
        numbers=", ".join(f"i64 %a{i}" for i in range(count)),
        before="%thread = call ptr @PyEval_SaveThread()" if releases else "",
        after="call void @PyEval_RestoreThread(ptr %thread)" if releases else "",
    )


def _module(function: Any, name: str) -> llvm.ModuleRef:
    """Return the LLVM of a function that Numba has compiled, under a name of ours."""
    (signature,) = function.signatures
    module = llvm.parse_assembly(function.inspect_llvm(signature))
    module.get_function(function.overloads[signature].fndesc.llvm_func_name).name = name
    return module


def _machine() -> llvm.TargetMachine:
    """Return LLVM's description of this processor, for which code is made."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    cpu, features = processor()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=cpu, features=features, opt=3, codemodel="jitdefault", jit=True
    )


def compile_all(codecs: Sequence[str]) -> bytes:
    """Return the object file, with these codecs; takes some seconds."""
    target = _machine()
    whole = llvm.parse_assembly(_functions(codecs))
    whole.triple = target.triple
    whole.link_in(_module(loops.run, "loop"))
    for name in SIMPLE:
        whole.link_in(_module(getattr(loops, name), f"loop_{name}"))
    for name in codecs:
        encoding = import_module("ringreduce.native.encoding")  # This compiles.
        whole.link_in(_module(getattr(encoding, name), f"loop_{name}"))
    numbers = ir.Module()
    for name in FUNCTIONS:
        emit(numbers, name)
    whole.link_in(llvm.parse_assembly(str(numbers)))
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = True
    options.loop_unrolling = False  # Vectors are interleaved all the same; code is a third as large, and made sooner.
    builder = llvm.create_pass_builder(target, options)
    builder.getModulePassManager().run(whole, builder)
    return bytes(target.emit_object(whole))


if __name__ == "__main__":
    path, *codecs = sys.argv[1:]
    code = compile_all(codecs)
    replace_file(Path(path), lambda file: file.write(code))
