"""PTX is executed as the PTX manual says: addresses are computed right, and what cannot be followed is refused."""

from __future__ import annotations

import numpy as np
import pytest

from microddp_kernels.inspection.ptx import parse_kernel
from microddp_kernels.inspection.trace import Access, Untraceable, trace

NUM_THREADS = 64
THREADS = range(NUM_THREADS)
U32, U64 = 2**32, 2**64

HEAD = """
.version 8.0
.target sm_90a
.visible .entry kernel(
    .param .u64 .ptr .global .align 1 kernel_param_0,
    .param .u32 kernel_param_1
)
.reqntid 64
{
    .reg .b64 %rd<9>;
    ld.param.b64 %rd1, [kernel_param_0];   // the address
    ld.param.b32 %r1, [kernel_param_1];
    mov.u32 %r2, %tid.x;
    mov.u32 %r3, %ctaid.x;
    cvt.u64.u32 %rd2, %r2;
"""
TAIL = "\n    ret;\n}\n"


def _trace(body: str, argument: int = 7, base: int = 0, memory: dict[int, bytes] | None = None) -> list[Access]:
    kernel = parse_kernel(HEAD + body + TAIL)
    sizes = {"num_threads": NUM_THREADS, "program": 3, "num_programs": 5}
    return trace(kernel, [base, argument], memory=memory or {}, **sizes)


def _addresses(body: str, argument: int = 7) -> list[int]:
    """What a body leaves in %rd3, for each thread."""
    (access,) = _trace(body + "\n st.global.b8 [ %rd3 + 0 ], { %rs1 };", argument)
    return list(access.addresses)


CASES = [
    ("add.s64 %rd3, %rd2, 5;", lambda tid: tid + 5),
    ("sub.s32 %r4, %r2, 9; cvt.s64.s32 %rd3, %r4;", lambda tid: (tid - 9) % U64),
    ("sub.s32 %r4, %r2, 9; cvt.u64.u32 %rd3, %r4;", lambda tid: (tid - 9) % U32),
    ("mul.wide.u32 %rd3, %r3, 2147483648;", lambda tid: 3 * 2**31),
    ("sub.s32 %r4, %r2, 9; mul.wide.s32 %rd3, %r4, 4;", lambda tid: (tid - 9) * 4 % U64),
    ("mul.lo.s32 %r4, %r2, 123456789; cvt.u64.u32 %rd3, %r4;", lambda tid: tid * 123456789 % U32),
    ("mad.lo.s32 %r4, %r2, %r3, %r1; cvt.u64.u32 %rd3, %r4;", lambda tid: tid * 3 + 7),
    ("mul.hi.u32 %r4, %r2, -1; cvt.u64.u32 %rd3, %r4;", lambda tid: tid * (U32 - 1) // U32),
    ("shl.b32 %r4, %r2, 30; cvt.u64.u32 %rd3, %r4;", lambda tid: (tid << 30) % U32),
    ("shl.b32 %r4, %r2, 32; cvt.u64.u32 %rd3, %r4;", lambda tid: 0),
    ("sub.s32 %r4, %r2, 9; shr.s32 %r4, %r4, 1; cvt.s64.s32 %rd3, %r4;", lambda tid: ((tid - 9) >> 1) % U64),
    ("sub.s32 %r4, %r2, 9; shr.u32 %r4, %r4, 1; cvt.u64.u32 %rd3, %r4;", lambda tid: (tid - 9) % U32 >> 1),
    ("bfe.u32 %r4, %r2, 2, 3; cvt.u64.u32 %rd3, %r4;", lambda tid: tid >> 2 & 7),
    ("and.b32 %r4, %r2, 12; xor.b32 %r4, %r4, 5; or.b32 %r4, %r4, 0x40; cvt.u64.u32 %rd3, %r4;",
     lambda tid: (tid & 12 ^ 5) | 64),
    ("not.b32 %r4, %r2; cvt.u64.u32 %rd3, %r4;", lambda tid: ~tid % U32),
    ("neg.s32 %r4, %r2; cvt.s64.s32 %rd3, %r4;", lambda tid: -tid % U64),
    ("div.u32 %r4, %r2, %r1; cvt.u64.u32 %rd3, %r4;", lambda tid: tid // 7),
    ("sub.s32 %r4, %r2, 9; div.s32 %r4, %r4, %r1; cvt.s64.s32 %rd3, %r4;", lambda tid: int((tid - 9) / 7) % U64),
    ("sub.s32 %r4, %r2, 9; rem.s32 %r4, %r4, %r1; cvt.s64.s32 %rd3, %r4;",
     lambda tid: (tid - 9 - int((tid - 9) / 7) * 7) % U64),
    ("min.u32 %r4, %r2, %r1; cvt.u64.u32 %rd3, %r4;", lambda tid: min(tid, 7)),
    ("sub.s32 %r4, %r2, 9; max.s32 %r4, %r4, -2; cvt.s64.s32 %rd3, %r4;", lambda tid: max(tid - 9, -2) % U64),
    ("setp.lt.s32 %p1, %r2, %r1; selp.b64 %rd3, 100, 200, %p1;", lambda tid: 100 if tid < 7 else 200),
    ("sub.s32 %r4, %r2, 9; setp.gt.u32 %p1, %r4, 60; selp.b64 %rd3, 1, 0, %p1;", lambda tid: int((tid - 9) % U32 > 60)),
    ("setp.ge.s32 %p1, %r2, 9; not.pred %p2, %p1; @%p2 mov.b64 %rd2, 1000; mov.b64 %rd3, %rd2;",
     lambda tid: tid if tid >= 9 else 1000),
    ("cvt.s64.s8 %rd3, %r2;", lambda tid: tid),
    ("mov.b64 %rd3, {%r2, %r3};", lambda tid: 3 * U32 + tid),
    ("mov.b64 %rd4, {%r3, %r2}; mov.b64 {%r4, %r5}, %rd4; mul.wide.u32 %rd3, %r5, 4;", lambda tid: 4 * tid),
    ("mov.b32 {%rs1, %rs2}, %r2; mov.b32 %r4, {%rs2, %rs1}; cvt.u64.u32 %rd3, %r4;", lambda tid: tid << 16),
    ("shf.l.wrap.b32 %r4, -1, %r2, 33; cvt.u64.u32 %rd3, %r4;", lambda tid: tid << 1 | 1),
    ("shf.l.clamp.b32 %r4, %r2, %r3, 33; cvt.u64.u32 %rd3, %r4;", lambda tid: tid),
    ("shf.r.wrap.b32 %r4, %r2, %r3, 1; cvt.u64.u32 %rd3, %r4;", lambda tid: tid >> 1 | 1 << 31),
    ("shf.r.clamp.b32 %r4, %r2, %r3, 99; cvt.u64.u32 %rd3, %r4;", lambda tid: 3),
    ("shl.b32 %r4, %r2, 2; cvt.s64.s8 %rd3, %r4;", lambda tid: (tid * 4 if tid < 32 else tid * 4 - 256) % U64),
]  # fmt: skip


@pytest.mark.parametrize(("body", "expected"), CASES, ids=[body for body, _ in CASES])
def test_integers(body: str, expected: object) -> None:
    assert callable(expected)
    assert _addresses(body) == [expected(tid) for tid in THREADS]


def test_accesses_in_the_order_of_execution() -> None:
    body = """
    mul.wide.u32 %rd3, %r2, 16;
    add.s64 %rd4, %rd1, %rd3;
    ld.global.v4.b32 { %r5, %r6, %r7, %r8 }, [ %rd4 + 0 ];
    setp.lt.u32 %p1, %r2, 2;
    @%p1 ld.global.L1::evict_first.b16 { %rs1 }, [ %rd4 + -2 ];
    @!%p1 st.global.v2.b64 [ %rd4 + 0x10 ], { %rd5, %rd6 };
    """
    wide, guarded, stored = _trace(body, base=1000)
    assert (wide.is_store, wide.nbytes, wide.addresses) == (False, 16, tuple(1000 + 16 * tid for tid in THREADS))
    assert (guarded.is_store, guarded.nbytes, guarded.addresses) == (False, 2, (998, 1014))
    assert (stored.is_store, stored.nbytes, stored.addresses[0]) == (True, 16, 1000 + 32 + 16)
    assert [each.distinct_nbytes for each in (wide, guarded, stored)] == [16 * 64, 4, 16 * 62]


@pytest.mark.parametrize(
    ("addresses", "nbytes", "distinct"),
    [((0, 0, 0), 4, 4), ((0, 4, 8), 4, 12), ((8, 0, 4, 4), 4, 12), ((0, 2), 4, 6), ((0, 100), 16, 32)],
)
def test_bytes_that_are_asked_for_twice_count_once(addresses: tuple[int, ...], nbytes: int, distinct: int) -> None:
    assert Access(False, nbytes, addresses).distinct_nbytes == distinct


def test_a_loop_is_executed() -> None:
    body = """
    mov.b64 %rd3, %rd1;
    mov.b32 %r4, 0;
$L__BB0_1:
    st.global.b32 [ %rd3 + 0 ], { %r9 };
    add.s64 %rd3, %rd3, 4;
    add.s32 %r4, %r4, 1;
    setp.lt.s32 %p1, %r4, %r1;
    @%p1 bra $L__BB0_1;
    """
    assert [each.addresses[0] for each in _trace(body)] == [4 * index for index in range(7)]
    endless = "$L__BB0_1: add.s32 %r4, %r2, 1; bra $L__BB0_1;"
    with pytest.raises(Untraceable, match="has not ended"):
        _trace(endless)


BRANCH = """
    mov.b64 %rd3, %rd2;
    mov.b32 %r4, 5;
    ld.global.b32 { %r5 }, [ %rd1 + 0 ];
    setp.eq.s32 %p1, %r5, 0;
    @%p1 bra $L__BB0_2;
    mov.b32 %r4, 6;
    {INSIDE}
$L__BB0_2:
    st.global.b8 [ {ADDRESS} + 0 ], { %rs1 };
"""


def test_a_branch_on_data_is_followed_both_ways_up_to_where_they_meet() -> None:
    def body(inside: str, address: str) -> str:
        return BRANCH.replace("{INSIDE}", inside).replace("{ADDRESS}", address)

    assert _trace(body("", "%rd3"))[-1].addresses == tuple(THREADS)
    with pytest.raises(Untraceable, match="st.global.*the address depends on data"):
        _trace(body("cvt.u64.u32 %rd3, %r4;", "%rd3"))
    with pytest.raises(Untraceable, match="whether memory is accessed depends on data"):
        _trace(body("ld.global.b32 { %r6 }, [ %rd1 + 0 ];", "%rd3"))
    with pytest.raises(Untraceable, match="some threads may end here"):
        _trace(body("ret;", "%rd3"))
    nested = "setp.eq.s32 %p2, %r5, 1; @%p2 bra $L__BB0_2; mov.b32 %r4, 7;"
    assert _trace(body(nested, "%rd3"))[-1].addresses == tuple(THREADS)


def test_tables_are_read() -> None:
    table = np.array([40, 50, 60, 70], dtype=np.int64)
    body = """
    mul.wide.u32 %rd3, %r3, 8;
    add.s64 %rd4, %rd1, %rd3;
    ld.global.b64 { %rd5 }, [ %rd4 + 0 ];
    st.global.b8 [ %rd5 + 0 ], { %rs1 };
    """
    assert _trace(body, base=5000, memory={5000: table.tobytes()})[-1].addresses == (70,) * NUM_THREADS
    for start in (4999, 5025):  # the entry of 8 bytes at 5024 ends one byte behind the table, or starts one before it
        with pytest.raises(Untraceable, match="the address depends on data"):
            _trace(body, base=5000, memory={start: table.tobytes()})


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("atom.global.add.u32 %r4, [ %rd1 + 0 ], 1;", "this instruction is not modelled"),
        ("cp.async.bulk.shared::cta.global [ %r4 ], [ %rd1 ], 16;", "this instruction is not modelled"),
        ("ld.b32 %r4, [ %rd1 + 0 ];", "this kind of memory is not modelled"),
        ("add.f32 %r4, %r2, %r2; cvt.u64.u32 %rd3, %r4; ld.global.b32 { %r5 }, [ %rd3 ];", "the address depends"),
        (
            "mov.b128 %rq1, {%rd1, %rd2}; mov.b128 {%rd3, %rd4}, %rq1; ld.global.b8 {%r5}, [ %rd4 ];",
            "the address depends",
        ),
        ("setp.lt.f32 %p1, %r4, %r2; @%p1 st.global.b32 [ %rd1 ], { %r5 };", "the guard depends on data"),
        ("ld.shared.b32 %r4, [ %r2 ]; setp.eq.s32 %p1, %r4, 0; @%p1 ret;", "some threads may end here"),
        ("mov.b64 { %r4, %r2 }, %rd5; cvt.u64.u32 %rd3, %r2; ld.global.b32 { %r5 }, [ %rd3 ];", "the address depends"),
        ("shfl.sync.bfly.b32 %r4|%p1, %r2, 1, 31, -1; @%p1 st.global.b8 [ %rd1 ], { %rs1 };", "the guard depends"),
    ],
)
def test_what_cannot_be_followed_is_refused(body: str, text: str) -> None:
    with pytest.raises(Untraceable, match=text):
        _trace(body)


def test_ptx_that_cannot_be_read() -> None:
    with pytest.raises(ValueError, match="one entry function, found 0"):
        parse_kernel(".version 8.0")
    with pytest.raises(ValueError, match="does not end"):
        parse_kernel(HEAD)
    with pytest.raises(ValueError, match="unreadable PTX: '123'"):
        parse_kernel(HEAD + "123;" + TAIL)
