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


def test_every_launch_compiles(recorded):
    for alpha, scale, margin in ((1.25, 20.0, 0.2), (3.0, 3.0, 0.05)):
        launches.test_pairs_scores_and_solution((300, 64, 5), alpha, scale, margin)
    launches.test_prepare_and_screen((300, 64, 5), torch.float16)
    launches.test_refresh(37, 40, torch.bfloat16)
    for only_active in (False, True):
        launches.test_update(37, 40, 0.9, True, only_active)
        launches.test_update_of_given_rows(0.0, False, only_active, 0.3)
    for alpha in (1.0, 1.25, 1.3):
        launches.test_blocks((300, 64, 5), alpha)
    launches.test_entries()
    launches.test_unit_rows()
    names = {entry[1] for entry in recorded.values()}
    assert {"_screen", "_bound", "_filter", "_score", "_solve", "_sweep", "_posterior"} <= names
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
