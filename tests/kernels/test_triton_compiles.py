"""Every kernel compiles for a GPU, on a machine without one.

The interpreter accepts what the compiler does not. So the launches of the interpreted tests are
recorded, and a second process without the interpreter compiles each of them for Hopper.
"""

import json
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor

if torch.cuda.is_available():
    pytest.skip("the kernels run for real here", allow_module_level=True)

import qmargin
from qmargin.heads.optimizers import ExactSGD, SparseSGD
from qmargin.kernels import dispatch
from qmargin.kernels.triton import rows as row_kernels
from tests.heads import test_fused_chunks as searches
from tests.heads import test_matrix as matrices
from tests.heads import test_references_interpreted as references
from tests.kernels import test_triton_head as launches

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

COMPILE = """
import json, sys
from importlib import import_module
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
for module, name, signature, constants, options in json.load(sys.stdin):
    kernel = getattr(import_module(module), name)
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    print(f"{module}.{name}")
"""


def type_name(value):
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{dtype_name(value.base.dtype)}{list(value.block_shape)}>"
    if isinstance(value, torch.Tensor):
        return f"*{dtype_name(value.dtype)}"
    return {int: "i32", float: "fp32"}[type(value)]


def dtype_name(dtype):
    name = str(dtype).removeprefix("torch.")
    return name.replace("float", "fp").replace("bfp", "bf").replace("int", "i")


@pytest.fixture
def recorded(monkeypatch):
    """Signatures of all launches, by name and types."""
    found = {}
    run = interpreter.InterpretedFunction.run

    def record(self, *args, grid, warmup, **options):
        hints = self.fn.__annotations__
        bound = dict(zip(self.arg_names, args, strict=True))
        constants = {n: v for n, v in bound.items() if "constexpr" in str(hints.get(n))}
        signature = {
            n: "constexpr" if n in constants else type_name(value) for n, value in bound.items()
        }
        entry = (self.fn.__module__, self.fn.__name__, signature, constants, options)
        found[json.dumps(entry, default=str)] = entry
        return run(self, *args, grid=grid, warmup=warmup, **options)

    monkeypatch.setattr(interpreter.InterpretedFunction, "run", record)
    return found


def test_every_launch_compiles(recorded, monkeypatch):
    for alpha, scale, margin in ((1.25, 20.0, 0.2), (3.0, 3.0, 0.05)):
        launches.test_pairs_scores_and_solution((300, 64, 5), alpha, scale, margin)
    launches.test_prepare_and_screen((300, 64, 5), torch.float16)
    launches.test_refresh(37, 40, torch.bfloat16)
    for only_active in (False, True):
        launches.test_update(37, 40, 0.9, True, only_active)
        launches.test_update_of_given_rows(0.0, False, only_active, 0.3)
    for alpha in (1.0, 1.25, 1.3):
        launches.test_blocks((300, 64, 5), alpha)
    for alpha in (1.25, 1.3, 2.0):
        searches.test_rows_of_every_width(alpha, 200, monkeypatch)
    launches.test_entries()
    launches.test_unit_rows()
    names = compile_all(recorded)
    assert {"_screen", "_bound", "_filter", "_score", "_solve", "_sweep", "_posterior"} <= names
    assert {"_row_sums", "_begin", "_advance", "_conclude"} <= names


def test_every_launch_of_matrix_steps_compiles(recorded, monkeypatch):
    monkeypatch.setattr(dispatch, "may_interpret", True)
    for path, alpha in (("sparse", 1.25), ("sparse", 1.3), ("chunked", 1.0)):
        for optimizer in (ExactSGD, SparseSGD):
            matrices.test_updates(optimizer, path, alpha, 1.0)
        matrices.test_norm_and_forms_of_the_gradient(path, alpha)
    for reduction in ("mean", "none"):
        for limit in (1 << 29, 0):
            for path, alpha in (("sparse", 1.5), ("chunked", 1.0), ("chunked", 1.5)):
                matrices.test_ignored_rows_and_reductions(reduction, limit, path, alpha)
    matrices.test_rows_whose_lists_are_too_short_are_solved_without_them(monkeypatch, 2, 8)
    matrices.test_margins_without_a_closed_form(qmargin.MagFaceMargin(), 1 << 29)
    matrices.test_sparse_steps_match_the_definition(1.3, qmargin.AngularMargin(0.3), 33)
    matrices.test_a_forward_pass_without_gradients_keeps_none()
    names = compile_all(recorded)
    kernels = "_prepare_rows _list_rows _score_rows _solve_lists _pull_rows _solve_row _reduce"
    assert {
        *kernels.split(),
        "_settle_lists",
        "_scale_rows",
        "_update",
        "_note_update",
        "_solve_softmax",
    } <= names


@pytest.mark.filterwarnings("ignore::qmargin.errors.MarginWarning")
def test_every_launch_with_a_reference_compiles(recorded, monkeypatch):
    monkeypatch.setattr(dispatch, "may_interpret", True)
    batch = references.make_batch()
    for alpha in (1.25, 1.3, 2.0, 3.0):
        references.test_sparse_steps(alpha, "all", batch)
    for alpha in (1.0, 1.25, 1.3, 2.0):
        references.test_blocks(alpha, "prior", batch)
    names = compile_all(recorded)
    assert {"_bound", "_solve", "_score", "_row_sums", "_posterior", "_begin"} <= names


def test_every_launch_of_rows_compiles(recorded):
    """Every form of level, with every kind of target, with a reference measure and without."""
    labels, own = torch.tensor([3, -1]), torch.zeros(2, dtype=torch.float64)
    for b in (-0.5, -1e-4, 0.0, 0.05, 0.25, 0.3, 0.5, 1.0, 2.0):
        for dtype in (torch.float32, torch.bfloat16):
            values = torch.randn(2, 8).to(dtype)
            for reference in (None, torch.zeros(2, 8)):
                common = {"log_reference": reference}
                plain = row_kernels.solve(values, 4.0, b, None, **common)
                row_kernels.solve(values, 4.0, b, labels.int(), target=(own, own), **common)
                for margin in ((0.1, 0.2, 0.0), (0.0, 0.0, 0.5), (0.0, 0.0, 0.5, True)):
                    given = {"margin": margin, "ignore_index": -1}
                    found = row_kernels.solve(values, 4.0, b, labels, **given, **common)
                root = {"anchor": plain.anchor, "level": plain.level}
                row_kernels.write_posterior(values, 4.0, b, None, **root, weights=None, **common)
                row_kernels.write_posterior(
                    values, 4.0, b, labels, **root, weights=plain.value, **common,
                    target_weights=plain.value, out_dtype=torch.float16,
                )  # fmt: skip
            for is_mean in (False, True):
                _, share = row_kernels.reduce_rows(
                    found.value, labels, mean=is_mean, ignore_index=-1
                )
            solution = found.anchor, found.level, found.target_gradient
            for part, grad in ((share, share), (None, found.value)):
                row_kernels.write_gradient(
                    values, 4.0, b, labels, (*solution, part), grad, ignore_index=-1
                )
    names = compile_all(recorded)
    assert names == {"_solve_rows", "_solve_softmax", "_reduce_rows", "_write_posterior"}


def compile_all(recorded) -> set[str]:
    """Compile what was launched in a process without the interpreter; returns the names."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPILE],
        input=json.dumps(list(recorded.values())),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert len(done.stdout.split()) == len(recorded)
    return {entry[1] for entry in recorded.values()}
