"""Machine code is read right: the shortest way with given accesses, and no way where the code does not tell."""

from __future__ import annotations

import pytest

from microddp_kernels.inspection.fused import count_fused
from microddp_kernels.inspection.ptx import parse_kernel
from microddp_kernels.inspection.sass import Signature, parse_sass, shortest_way

FULL: Signature = (("load", 16, 2), ("store", 16, 1))
LOADS = "LDG.E.128 R4, desc[UR4][R2.64] ;|LDG.E.128.CONSTANT R8, desc[UR4][R2.64+0x10] ;"
STORE = "STG.E.128 desc[UR4][R2.64], R4 ;"
TAIL = "@!P1 LDG.E.U8 R4, desc[UR4][R2.64] ;|@!P1 STG.E.U8 desc[UR4][R2.64], R4 ;|EXIT ;"


def _code(*lines: str) -> str:
    """As ``nvdisasm`` writes it: labels at the margin."""
    text = [".section\t.text.kernel", "kernel:", ".text.kernel:"]
    for index, line in enumerate("|".join(lines).split("|")):
        guarded = line.startswith("@")
        text.append(line if line.endswith(":") else f"        /*{index * 16:04x}*/   {' ' * 12 * (not guarded)}{line}")
    return "\n".join(text)


def _way(*lines: str, signature: Signature = FULL) -> int | None:
    return shortest_way(parse_sass(_code(*lines)), signature)


def test_the_block_without_masks_is_told_from_the_tail() -> None:
    lines = ("S2R R0, SR_TID.X ;", "@!P0 BRA `(.L_x_0) ;", TAIL, ".L_x_0:", LOADS, "FADD R4, R4, R8 ;", STORE, "EXIT ;")
    assert _way(*lines) == 2 + 5
    assert _way(*lines, signature=(("load", 1, 1), ("store", 1, 1))) == 2 + 3
    assert _way(*lines, signature=(("load", 16, 1), ("store", 16, 1))) is None


def test_whether_a_full_block_spills() -> None:
    tail = ("@!P0 BRA `(.L_x_0) ;", "STL [R1], R4 ;", TAIL, ".L_x_0:", LOADS)
    for full, spills in ((STORE, 0), ("LDL.LU R4, [R1] ;|" + STORE, 1)):
        code = parse_sass(_code(*tail, full, "EXIT ;"))
        ways = [shortest_way(code, FULL, spill_cost=cost) for cost in (1, 2)]
        assert ways == [5 + spills, 5 + 2 * spills]
        assert sum(each.spills for each in code) == 1 + spills


def test_of_several_ways_the_shortest() -> None:
    slow = "@!P2 BRA `(.L_x_1) ;|MOV R40, 0x10 ;|CALL.REL.NOINC `(slowpath) ;|MOV R4, R0 ;|.L_x_1:"
    lines = (LOADS, slow, slow.replace("_1", "_2"), STORE, "EXIT ;", "slowpath:", "FADD R0, R0, R0 ;", "RET.REL R40 ;")
    assert _way(*lines) == 2 + 1 + 1 + 2


def test_threads_that_wait_for_each_other_go_on_at_the_label_of_their_barrier() -> None:
    division = (
        "BSSY B2, `(.L_x_{1}) ;|@!P5 BRA `(.L_x_{0}) ;|CALL.REL.NOINC `(slow) ;|.L_x_{0}:|BSYNC B2 ;|NOP ;|.L_x_{1}:"
    )
    twice = [division.replace("{0}", str(each)).replace("{1}", str(each + 1)) for each in (10, 20)]
    lines = (LOADS, *twice, STORE, "EXIT ;", "slow:", "RET.REL.NODEC R40 `(kernel) ;")
    assert _way(*lines) == 2 + 3 + 3 + 2
    assert _way(LOADS, "BSYNC B1 ;", STORE, "EXIT ;") is None


@pytest.mark.parametrize(
    "lines",
    [
        (LOADS, ".L_x_1:", "FADD R4, R4, R4 ;", "@P0 BRA `(.L_x_1) ;", STORE, "EXIT ;"),  # a loop
        (LOADS, "BRX R4 -0x10 ;", STORE, "EXIT ;"),  # a jump to who knows where
        (LOADS, "BRA `(.L_x_9) ;", STORE, "EXIT ;"),  # no such label
        (LOADS, STORE, "FADD R4, R4, R4 ;"),  # no end
        ("@P0 LDG.E.128 R4, desc[UR4][R2.64] ;", "@!P0 LDG.E.U8 R4, desc[UR4][R2.64] ;", STORE, "EXIT ;"),
    ],
    ids=["loop", "indirect", "label", "end", "both ways in one block"],
)
def test_where_the_code_does_not_tell_there_is_no_way(lines: tuple[str, ...]) -> None:
    assert _way(*lines) is None


def test_conditions_stand_before_instructions_or_before_targets() -> None:
    for jump in ("@P0 BRA `(.L_x_0) ;", "BRA.U UP0, `(.L_x_0) ;", "@!UP1 BRA `(.L_x_0) ;"):
        assert _way(jump, LOADS, STORE, "EXIT ;", ".L_x_0:", "EXIT ;") == 5
    assert _way("BRA `(.L_x_0) ;", LOADS, STORE, "EXIT ;", ".L_x_0:", "EXIT ;") is None
    assert _way("@P0 EXIT ;", LOADS, STORE, "EXIT ;") == 5
    assert _way("@PT EXIT ;", LOADS, STORE, "EXIT ;") is None


def test_widths_and_padding() -> None:
    trap = ".L_x_7:|BRA `(.L_x_7);|NOP;|NOP;"
    code = parse_sass(
        _code("LDG.E R1, [R2] ;|LDG.E.64 R1, [R2] ;|LDG.E.U16 R1, [R2] ;|LDG.E.S8 R1, [R2] ;|EXIT ;", trap)
    )
    assert [each.opcode for each in code] == ["LDG.E", "LDG.E.64", "LDG.E.U16", "LDG.E.S8", "EXIT"]
    assert shortest_way(code, tuple(("load", nbytes, 1) for nbytes in (1, 2, 4, 8))) == 5
    assert _way("LDG.E.ENL2.256 R1, R5, [R2] ;", "EXIT ;", signature=(("load", 32, 1),)) == 2


BOTH = "call float @llvm.nvvm.fma.rn.ftz.f(\ncall float @llvm.nvvm.fma.rn.f("
PTX = ".visible .entry kernel(\n)\n{{\n{}\nret;\n}}\n"


@pytest.mark.parametrize(
    ("ptx", "llvm_ir", "counts"),
    [
        ("fma.rn.f32 %r1, %r2, %r3, %r4;", "", (1, 1)),
        ("fma.rn.f32 %r1, %r2, %r3, %r4;", "%1 = call float @llvm.fma.f32(float %2)", (1, 0)),
        ("fma.rn.f32x2 %r1, %r2, %r3, %r4;", "%1 = tail call <2 x float> @llvm.fma.v2f32(<2 x float> %2)", (2, 0)),
        ("fma.rn.f64 %r1, %r2, %r3, %r4;", "%1 = call float @llvm.fma.f32(float %2)", (1, 1)),
        ("fma.rn.ftz.f32 %r1, %r2, %r3, %r4;", BOTH, (1, 0)),
        (
            "fma.rn.ftz.f32 %r1, %r2, %r3, %r4; fma.rn.f32 %r1, %r2, %r3, %r4;",
            BOTH,
            (2, 1),
        ),
        ("mad.rn.f32 %r1, %r2, %r3, %r4;", "", (1, 1)),
        ("mad.lo.s32 %r1, %r2, %r3, %r4; // fma.rn.f32", "", (0, 0)),
        ("mov.b16 %rs1, 0x3F80; fma.rn.bf16 %rs2, %rs3, %rs1, %rs4;", "", (1, 0)),
        ("mov.b16 %rs1, 0x3F81; fma.rn.bf16 %rs2, %rs3, %rs1, %rs4;", "", (1, 1)),
        ("mov.b32 %r1, -2147450880; fma.rn.bf16x2 %r2, %r3, %r4, %r1;", "", (2, 0)),
        ("mov.b16 %rs1, 0x3F80; mov.b16 %rs1, %rs9; fma.rn.bf16 %rs2, %rs3, %rs1, %rs4;", "", (1, 1)),
    ],
)  # fmt: skip
def test_contraction_is_told_from_what_was_asked_for(ptx: str, llvm_ir: str, counts: tuple[int, int]) -> None:
    assert count_fused(parse_kernel(PTX.format(ptx)), llvm_ir) == counts
