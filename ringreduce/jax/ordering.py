"""The order of the collectives of a compiled program: that in which it was traced, on all ranks.

XLA runs operations that do not depend on each other in an order of its own, which is another one on a rank whose
program computes more. And a function that is traced once, as a helper under `jit` or the body of a loop, has one call
for all places that use it. So each call gets a name of its own, and a token of the call before it, as JAX does for
ordered effects; an effect in JAX's sense would rule out `remat`, and slow down the start of each program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.extend.mlir import ir

#: What takes a token behind its operands, and returns one behind its results.
_LOOP = "stablehlo.while"
_CHOICES = ("stablehlo.case", "stablehlo.if")

_FUNCTION = "func.func"
_CALL = "func.call"


def put_in_order(module: Any, target: str, ordered: str, numbered: Callable[[Sequence[str]], Sequence[str]]) -> None:
    """Let a program make its calls of a target one after the other; of a program that makes one, once, leave all.

    Functions that make such calls become a part of those that call them.

    Args:
        module: the program, in StableHLO, before it is compiled.
        target: of the calls, whose attribute ``text`` says what they do.
        ordered: the target that they get, which takes a token behind the arguments, and returns one.
        numbered: returns the texts that they get, given theirs, in the order of the program.
    """
    with module.context, ir.Location.unknown():
        _Program(module, target).put_in_order(ordered, numbered)


class _Program:
    def __init__(self, module: Any, target: str) -> None:
        self._target = target
        functions = [function.operation for function in module.body.operations if function.operation.name == _FUNCTION]
        self._functions = {ir.StringAttr(function.attributes["sym_name"]).value: function for function in functions}
        self._counts: dict[str, int] = {}
        self._token = ir.Type.parse("!stablehlo.token")

    def put_in_order(self, ordered: str, numbered: Callable[[Sequence[str]], Sequence[str]]) -> None:
        """See the function of this name."""
        if "main" not in self._functions or self._count_of("main") < 2:  # One call has no order.
            return
        (main,) = self._functions["main"].regions[0].blocks
        self._inline(main)
        for name, function in self._functions.items():
            if name != "main" and self._count_of(name):
                function.erase()
        texts = [_text_of(call) for call in self._calls(main)]
        self._ordered = ir.StringAttr.get(ordered)
        self._texts = iter(numbered(texts))
        self._thread(main, self._begin(ir.InsertionPoint.at_block_begin(main)))

    # ---- which parts make calls ----

    def _count_of(self, name: str) -> int:
        """Return how many calls a function makes, each place counted, and those of loops twice."""
        if name not in self._counts:
            self._counts[name] = 0  # No function calls itself.
            self._counts[name] = self._count(self._functions[name])
        return self._counts[name]

    def _count(self, operation: Any) -> int:
        if self._is_call(operation):
            return 1
        if operation.name == _CALL:
            return self._count_of(_callee(operation))
        inside: int = sum(self._count(inner) for block in _blocks(operation) for inner in _operations(block))
        return 2 * inside if operation.name == _LOOP else inside

    def _is_call(self, operation: Any) -> bool:
        if operation.name != "stablehlo.custom_call":
            return False
        return bool(ir.StringAttr(operation.attributes["call_target_name"]).value == self._target)

    def _calls(self, block: Any) -> Iterator[Any]:
        for each in _operations(block):
            if self._is_call(each):
                yield each
            for inner in _blocks(each):
                yield from self._calls(inner)

    # ---- functions become a part of what calls them ----

    def _inline(self, block: Any) -> None:
        for each in _operations(block):
            self._inline_in(each)

    def _inline_in(self, operation: Any) -> None:
        for block in _blocks(operation):
            self._inline(block)
        if operation.name != _CALL or not self._count(operation):
            return
        (body,) = self._functions[_callee(operation)].regions[0].blocks
        values = dict(zip(body.arguments, operation.operands, strict=True))
        *inner, end = _operations(body)
        made = []
        for each in inner:
            copy = each.clone(ip=ir.InsertionPoint(operation)).operation
            _replace_operands(copy, values)
            values.update(zip(each.results, copy.results, strict=True))
            made.append(copy)
        for result, value in zip(operation.results, end.operands, strict=True):
            result.replace_all_uses_with(values.get(value, value))
        operation.erase()
        for each in made:
            self._inline_in(each)

    # ---- tokens ----

    def _begin(self, place: Any) -> Any:
        return ir.Operation.create("stablehlo.after_all", results=[self._token], ip=place).results[0]

    def _thread(self, block: Any, token: Any) -> Any:
        """Lead a token through the calls of a block; return that of the last one."""
        for each in _operations(block):
            if self._is_call(each):
                token = self._with_token(each, token, changed=self._attributes(each)).results[-1]
            elif each.name == _LOOP and self._count(each):
                token = self._through_loop(each, token)
            elif each.name in _CHOICES and self._count(each):
                for branch in _blocks(each):
                    self._return(branch, self._thread(branch, token))
                token = self._with_token(each, None).results[-1]
            elif self._count(each):  # These regions cannot see values from outside.
                for inner in _blocks(each):
                    self._thread(inner, self._begin(ir.InsertionPoint.at_block_begin(inner)))
        return token

    def _through_loop(self, loop: Any, token: Any) -> Any:
        condition, body = _blocks(loop)
        given = [region.add_argument(self._token, loop.location) for region in (condition, body)]
        self._thread(condition, given[0])
        self._return(body, self._thread(body, given[1]))
        return self._with_token(loop, token).results[-1]

    def _return(self, block: Any, token: Any) -> None:
        end = _operations(block)[-1]
        ir.Operation.create(end.name, operands=[*end.operands, token], loc=end.location, ip=ir.InsertionPoint(end))
        end.erase()

    def _with_token(self, operation: Any, token: Any, changed: dict[str, Any] | None = None) -> Any:
        """Replace an operation by one that takes a token, if it is given one, and returns one."""
        made = ir.Operation.create(
            operation.name,
            results=[*(result.type for result in operation.results), self._token],
            operands=[*operation.operands, *([] if token is None else [token])],
            attributes=_attributes_of(operation) | (changed or {}),
            regions=len(operation.regions),
            loc=operation.location,
            ip=ir.InsertionPoint(operation),
        )
        for old, new in zip(operation.regions, made.regions, strict=True):
            for block in list(old.blocks):
                block.append_to(new)
        for old, new in zip(operation.results, made.results, strict=False):
            old.replace_all_uses_with(new)
        operation.erase()
        return made

    def _attributes(self, call: Any) -> dict[str, Any]:
        """Return what changes of the attributes of a call."""
        config = ir.DictAttr(call.attributes["mhlo.backend_config"])
        texts = {entry.name: entry.attr for entry in config} | {"text": ir.StringAttr.get(next(self._texts))}
        changed = {"call_target_name": self._ordered, "mhlo.backend_config": ir.DictAttr.get(texts)}
        scalar = ir.Attribute.parse("dense<> : tensor<0xindex>")
        for name in ("operand_layouts", "result_layouts"):
            changed[name] = ir.ArrayAttr.get([*ir.ArrayAttr(call.attributes[name]), scalar])
        aliases = ir.ArrayAttr(call.attributes["output_operand_aliases"])
        if len(aliases) and len(call.results) == 1:  # The one result is the first of two by now.
            changed["output_operand_aliases"] = ir.Attribute.parse(
                "[#stablehlo.output_operand_alias<output_tuple_indices = [0], operand_index = 0, "
                "operand_tuple_indices = []>]"
            )
        return changed


def _operations(block: Any) -> list[Any]:
    return [operation.operation for operation in block.operations]


def _blocks(operation: Any) -> list[Any]:
    return [block for region in operation.regions for block in region.blocks]


def _attributes_of(operation: Any) -> dict[str, Any]:
    attributes = operation.attributes
    return {attributes[place].name: attributes[place].attr for place in range(len(attributes))}


def _callee(call: Any) -> str:
    return str(ir.FlatSymbolRefAttr(call.attributes["callee"]).value)


def _text_of(call: Any) -> str:
    return str(ir.StringAttr(ir.DictAttr(call.attributes["mhlo.backend_config"])["text"]).value)


def _replace_operands(operation: Any, values: dict[Any, Any]) -> None:
    """Replace the values that an operation, or those within it, reads."""
    for place, value in enumerate(operation.operands):
        if value in values:
            operation.operands[place] = values[value]
    for block in _blocks(operation):
        for each in _operations(block):
            _replace_operands(each, values)
