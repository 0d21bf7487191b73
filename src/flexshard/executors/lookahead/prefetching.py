"""A hint that compiled loops give the processor: this element will be wanted soon.

Lookups of a batch lie anywhere in tables that no cache of a processor holds, so that a loop that asks for one after the
other waits for memory most of its time.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = ["prefetch"]


@intrinsic
def prefetch(_: Any, array: Any, index: Any) -> Any:
    """``prefetch(array, index)``, in compiled code: bring the element's line into the cache, of a row its first.

    The index, of the first dimension, is not checked. Nothing else changes, and nothing is waited for.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array_type, index_type = signature.args
        elements = context.make_array(array_type)(context, builder, arguments[0])
        first = context.cast(builder, arguments[1], index_type, types.intp)
        others = [context.get_constant(types.intp, 0)] * (array_type.ndim - 1)
        element = cgutils.get_item_pointer(context, builder, array_type, elements, [first, *others], wraparound=False)
        byte = ir.IntType(8).as_pointer()
        hint = builder.module.declare_intrinsic(
            "llvm.prefetch", [byte], ir.FunctionType(ir.VoidType(), [byte, *[ir.IntType(32)] * 3])
        )
        to_write, keep, data = (ir.Constant(ir.IntType(32), number) for number in (1, 3, 1))
        builder.call(hint, [builder.bitcast(element, byte), to_write, keep, data])
        return context.get_dummy_value()

    return types.void(array, index), generate
