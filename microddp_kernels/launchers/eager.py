"""Combines and copies CPU tensors with torch's own kernels: the default launcher there."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from microddp_kernels.dtypes import FLOATS8
from microddp_kernels.launchers.base import Launcher
from microddp_kernels.launchers.checks import check_copy, check_devices, check_launch, check_pack, lanes_of, widths_of
from microddp_kernels.launchers.eager_convert import as_parts, convert
from microddp_kernels.launchers.eager_fold import fold
from microddp_kernels.launchers.eager_lanes import cut, fold_lanes
from microddp_kernels.launchers.eager_steps import Lanes, as_op_of_parts, steps_for
from microddp_kernels.reduce_op import CombineSpec, ReduceOp, Values

__all__ = ["EagerLauncher"]


class EagerLauncher(Launcher):
    """Two operands of one type take one torch call; everything else goes block by block through small buffers.

    So the extra memory of a thread is a few blocks of ``BLOCK_NUMEL`` elements (for functions of users: for each of
    torch's threads), or a few rows if those are longer, whatever the size of the tensors.

    An operator without ``eager`` is combined by its ``torch_function``, else by its Triton function evaluated on whole
    tensors; where neither can be, by the interpreter, with one RuntimeWarning for each operator. These functions see
    tensors of the accumulation types only, and truth values as int32. Complex elements of an operator without
    ``complex_combine`` come as their parts, in turn.
    """

    name = "eager"

    def combine(self, out: Values, operands: Sequence[Values], how: CombineSpec) -> None:
        """``out = how(operands)``, done on return.

        Raises:
            TypeError, ValueError: see ``microddp_kernels.launchers.checks``; a function of the operator returns what
                is no tensor of the right shape.
        """
        if len(operands) == 2 and how.weights is None and how.divisor is None and how.scale is None:
            first, second = operands
            op = how.op
            eager = op.eager
            if eager is not None and not op.lanes and op.accumulate is None and _are_alike(out, first, second, op):
                eager(first, second, out=out)
                return
        accumulation = check_launch(out, operands, how)
        out_lanes, operand_lanes = lanes_of(out), [lanes_of(each) for each in operands]
        check_devices(self.name, "cpu", *out_lanes, *(tensor for lanes in operand_lanes for tensor in lanes))
        op = how.op
        finalizes = how.divisor is not None and op.finalize is not None
        if not finalizes and (len(operands) == 1 or how.weights is not None or (op.eager and not op.lanes)):
            for lane, dtype in enumerate(accumulation):
                _fold_lane(out_lanes[lane], [lanes[lane] for lanes in operand_lanes], how, dtype)
        else:
            _fold_with_functions(out_lanes, operand_lanes, how, accumulation)

    def copy(self, out: torch.Tensor, source: torch.Tensor) -> None:
        """``out = source``, done on return."""
        check_copy(out, source)
        convert(out, source)

    def pack(self, out: torch.Tensor, sources: Sequence[torch.Tensor]) -> None:
        """Puts ``sources`` one after another into ``out``, done on return."""
        check_pack(out, sources)
        start = 0
        for source in sources:
            out[start : start + source.numel()].copy_(source.view(-1))
            start += source.numel()

    def unpack(self, outs: Sequence[torch.Tensor], source: torch.Tensor) -> None:
        """Cuts ``source`` into ``outs``, done on return."""
        check_pack(source, outs)
        start = 0
        for out in outs:
            out.view(-1).copy_(source[start : start + out.numel()])
            start += out.numel()


def _are_alike(out: Values, first: Values, second: Values, op: ReduceOp) -> bool:
    """Whether these are tensors of one legal type on which a call of ``op.eager`` rounds once, and of one numel."""
    if isinstance(out, tuple) or isinstance(first, tuple) or isinstance(second, tuple):
        return False
    dtype = out.dtype
    return (
        first.dtype is dtype
        and second.dtype is dtype
        and dtype in op.dtypes
        and dtype not in FLOATS8
        and out.numel() == first.numel() == second.numel()
    )


def _fold_lane(
    out: torch.Tensor, operands: Sequence[torch.Tensor], how: CombineSpec, accumulation: torch.dtype
) -> None:
    """A fold that calls no function but ``op.eager``; of complex elements by their parts, unless they are combined."""
    is_combined = len(operands) > 1 and how.weights is None
    if accumulation.is_complex and (how.op.complex_combine is None or not is_combined):
        out, operands = as_parts(out), [as_parts(each) for each in operands]
        accumulation = out.dtype
    fold(out, operands, how, accumulation)


def _fold_with_functions(
    out: Lanes, operands: Sequence[Lanes], how: CombineSpec, accumulation: tuple[torch.dtype, ...]
) -> None:
    """A fold by the operator's functions on whole tensors; where they cannot be evaluated, the interpreter goes on."""
    op = how.op
    widths = widths_of(op, out)
    num_rows = next((tensor.numel() for lane, tensor in zip(op.lanes, out) if not lane.wide), out[0].numel())
    if not num_rows:
        return
    rows_each, given = 1, [out, *operands]
    steps = None
    if accumulation[0].is_complex and not op.lanes:
        is_whole = (op.eager or op.torch_function) and (op.finalize is None or op.torch_finalize)
        if op.complex_combine is None:
            rows_each, given = 2, [(as_parts(each[0]),) for each in given]
            steps = steps_for(op, (given[0][0].dtype,))
        elif not is_whole:
            given = [(each[0].real, each[0].imag) for each in given]
            steps = steps_for(as_op_of_parts(op), (given[0][0].dtype,) * 2)
    steps = steps or steps_for(op, accumulation)
    done = 0
    if steps.refused is None:
        done = fold_lanes(given[0], given[1:], how, steps, widths, num_rows * rows_each) // rows_each
    if done < num_rows:
        _interpret([cut(each, widths, done, num_rows) for each in (out, *operands)], how)


def _interpret(lanes: Sequence[Lanes], how: CombineSpec) -> None:
    """The combine of ``lanes``, of ``out`` first, by the Triton interpreter."""
    from microddp_kernels.launchers import launcher_for

    out, *operands = [each if how.op.lanes else each[0] for each in lanes]
    launcher_for(torch.device("cpu"), "interpreter").combine(out, operands, how)
