"""What the kernels compile to: registers, spills, widths of accesses, bytes moved. No GPU is needed.

``inspect_kernels(cases_for([90], ["sum"]))`` compiles ``sum`` on every element type for sm_90 with the real Triton
compiler, in processes of their own, and returns what is known of each; ``KernelFacts.violations`` names the rules that
a kernel breaks. ``docs/kernels.md`` says how each figure is read.
"""

from __future__ import annotations

from microddp_kernels.inspection.cases import DTYPES, KERNELS, cases_for, load_operator
from microddp_kernels.inspection.facts import Case, InspectionError, KernelFacts, KernelFailure
from microddp_kernels.inspection.pool import inspect_cases, inspect_kernels

__all__ = [
    "DTYPES",
    "KERNELS",
    "Case",
    "InspectionError",
    "KernelFacts",
    "KernelFailure",
    "cases_for",
    "inspect_cases",
    "inspect_kernels",
    "load_operator",
]
