"""A backbone as one ONNX file with any batch size, compared with PyTorch before it is kept."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qmargin.errors import BackendError, ConfigError
from qmargin.files import describe_file, replacing

TOLERANCE = 1e-5
MAX_BYTES = 2_000_000_000  # one protobuf file holds no more
INPUT, OUTPUT = "inputs", "embeddings"
_TRACED, _TRIED = 2, (1, 2, 5)  # batch sizes; those that were not traced show that it is dynamic


def write_onnx(
    backbone: nn.Module,  # on the CPU, in evaluation mode
    path: Path,
    *,
    input_shape: tuple[int, ...],  # of one sample
    lengths: tuple[int, ...] = (),
    metadata: Mapping[str, str] | None = None,
) -> tuple[float, dict[str, str]]:
    """Write a backbone as ONNX: ``inputs [batch, ...]`` to ``embeddings [batch, d]``, float32.

    The file is kept only if onnxruntime and PyTorch agree, also for batch sizes that were not
    traced. Embeddings are compared at unit length, as in scoring. With ``lengths``, inputs are
    ``[batch, length, *input_shape]``: the first length is traced, the others are compared. Returns
    the largest difference and entries of a model card.
    """
    check_packages()
    if backbone.training:
        raise ConfigError("the backbone is in training mode; call eval() on it first")
    num_bytes = sum(value.numel() * 4 for value in backbone.state_dict().values())
    if num_bytes > MAX_BYTES:
        raise ConfigError(
            f"the weights take {num_bytes:,} bytes and one ONNX file holds {MAX_BYTES:,}; "
            "export a smaller network"
        )
    onnxruntime: Any = import_module("onnxruntime")  # it has no types
    with replacing(path) as temporary:
        shapes = [(length, *input_shape) for length in lengths] or [input_shape]
        names = ("batch", "length") if lengths else ("batch",)
        opset = _export(backbone, temporary, _example(_TRACED, shapes[0]), names, metadata or {})
        session = onnxruntime.InferenceSession(str(temporary), providers=["CPUExecutionProvider"])
        difference = _difference(backbone, session, shapes)
        if not difference <= TOLERANCE:  # a NaN is not
            raise BackendError(
                f"onnxruntime differs from PyTorch by {difference:.2g} and {TOLERANCE:g} is "
                "accepted; nothing was written, try another version of onnxruntime"
            )
    facts = {
        "onnx_file": path.name,
        "onnx_sha256": describe_file(path).sha256,
        "onnx_opset": str(opset),
        "onnx_runtime": f"onnxruntime {onnxruntime.__version__}",
        "onnx_max_difference": f"{difference:.2g} (at most {TOLERANCE:g}, of unit-length "
        "embeddings, against PyTorch in float32)",
    }
    return difference, facts


def check_packages() -> None:
    """Refuse an export whose packages are missing."""
    missing = [name for name in ("onnx", "onnxruntime", "onnxscript") if find_spec(name) is None]
    if missing:
        raise BackendError(
            f"{', '.join(missing)} is not installed; ONNX export needs "
            "`pip install 'qmargin[onnx]'`"
        )


def _example(rows: int, input_shape: tuple[int, ...]) -> Tensor:
    """Values in [-1, 1], the range of normalised images; always the same."""
    generator = torch.Generator().manual_seed(rows)
    return 2.0 * torch.rand((rows, *input_shape), generator=generator) - 1.0


def _export(
    backbone: nn.Module,
    path: Path,
    example: Tensor,
    names: tuple[str, ...],
    metadata: Mapping[str, str],
) -> int:
    """Trace and save; the first axes vary and have names. Returns the version of the operators."""
    varying = {axis: torch.export.Dim(name) for axis, name in enumerate(names)}
    with _quiet():
        try:
            program: Any = torch.onnx.export(
                backbone,
                (example,),
                dynamo=True,
                dynamic_shapes=(varying,),
                input_names=[INPUT],
                output_names=[OUTPUT],
                verbose=False,
            )
        except (RuntimeError, torch.onnx.errors.OnnxExporterError) as error:
            first_line = str(error).strip().splitlines()[0]
            raise BackendError(
                f"the network cannot be exported to ONNX ({first_line}); use one without "
                "control flow that depends on the values of its inputs"
            ) from error
        _forget_sources(program.model)
        program.model.metadata_props.update(metadata)
        program.save(str(path), external_data=False)
    return int(program.model.opset_imports[""])


def _forget_sources(model: Any) -> None:
    """Remove the exporter's stack traces, which name folders of this machine."""
    for graph in (model.graph, *model.functions.values()):
        graph.metadata_props.clear()
        for value in graph.inputs:
            value.metadata_props.clear()
        for node in graph.all_nodes() if hasattr(graph, "all_nodes") else graph:
            node.doc_string = None
            node.metadata_props.clear()
            for value in node.outputs:
                value.metadata_props.clear()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's notes on its own deprecated calls and optional parts."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _difference(backbone: nn.Module, session: Any, shapes: Sequence[tuple[int, ...]]) -> float:
    """Largest difference of an element between the file and the network, at unit length."""
    largest = torch.zeros(())
    for rows, shape in product(_TRIED, shapes):
        inputs = _example(rows, shape)
        with torch.inference_mode():
            expected = nn.functional.normalize(backbone(inputs).double())
        (output,) = session.run([OUTPUT], {INPUT: inputs.numpy()})
        found = nn.functional.normalize(torch.from_numpy(output).double())
        largest = torch.maximum(largest, (found - expected).abs().amax())  # keeps a NaN
    return float(largest)
