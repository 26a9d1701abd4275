"""Which names of ``triton.language`` an operator may use, and which of them have no torch form."""

from __future__ import annotations

from typing import Final

__all__ = ["FALLS_BACK", "NOT_ELEMENTWISE"]

_MEMORY: Final = (
    "advance atomic_add atomic_and atomic_cas atomic_load atomic_max atomic_min atomic_or atomic_poll atomic_store "
    "atomic_xchg atomic_xor debug_barrier load load_tensor_descriptor make_block_ptr make_tensor_descriptor store "
    "store_tensor_descriptor"
)
_POSITION: Final = "arange num_programs program_id swizzle2d"
_ACROSS: Final = (
    "argmax argmin associative_scan bitonic_merge cumprod cumsum dot dot_scaled flip gather histogram item max min "
    "reduce reduce_or softmax sort sort_impl sum topk xor_sum"
)
_SHAPE: Final = (
    "broadcast_to cat expand_dims interleave join permute ravel reshape split squeeze trans unsqueeze view T"
)

NOT_ELEMENTWISE: Final = {
    **dict.fromkeys(_MEMORY.split(), "accesses memory or synchronises"),
    **dict.fromkeys(_POSITION.split(), "depends on where an element lies"),
    **dict.fromkeys(_ACROSS.split(), "works across elements"),
    **dict.fromkeys(_SHAPE.split(), "changes the shape"),
}
"""By name of a function of ``triton.language`` (or of a method of its tensors): why no operator may use it."""

FALLS_BACK: Final = frozenset(
    "aggregate_replace block_type condition const constexpr_type device_print dtype inline_asm_elementwise "
    "map_elementwise pair_uniform_to_normal philox philox_impl pointer_type rand rand4x randint randint4x randn "
    "randn4x slice str_to_ty tensor_descriptor tensor_descriptor_type tuple tuple_type uint_to_uniform_float".split()
)
"""Names of ``triton.language`` that an operator may use and that are left to the interpreter."""
