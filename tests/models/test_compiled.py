"""Compiled backbones: one graph, the numbers and the errors of eager ones, few recompilations."""

import copy
import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from qmargin.errors import ConfigError, ShapeError
from qmargin.models import create_backbone, layers, list_backbones
from qmargin.models.face import IResNet, MobileFaceNet, VisionTransformer
from qmargin.models.features import FilterBank, _power_operator, power_spectrum
from qmargin.models.small import SmallConv, SmallMLP, StrokeNet, StrokeResNet
from qmargin.models.speaker import CamPlusPlus, EcapaTdnn, SpeakerResNet
from qmargin.registry import backbones

SMALL = (1, 1, 1, 1)
FACE = (3, 112, 112)


class Case(NamedTuple):
    make: Callable[..., nn.Module]
    shape: tuple[int, ...]  # of one sample
    options: dict[str, Any] = {}  # noqa: RUF012


masking = {"drop_path": 0.4, "mask_ratio": 0.3}
CASES = {
    "iresnet": Case(partial(IResNet, SMALL), FACE, {"dropout": 0.3}),
    "iresnet, lean": Case(partial(IResNet, SMALL), FACE, {"gradient_checkpointing": True}),
    "mobilefacenet": Case(partial(MobileFaceNet, SMALL, 1), FACE),
    "mobilefacenet, lean": Case(
        partial(MobileFaceNet, SMALL, 1), FACE, {"gradient_checkpointing": True}
    ),
    "vit": Case(partial(VisionTransformer, 16, 2), FACE, masking),
    "vit, lean": Case(
        partial(VisionTransformer, 16, 2), FACE, {**masking, "gradient_checkpointing": True}
    ),
    "speaker_resnet": Case(partial(SpeakerResNet, SMALL), (2000,), {"width": 4}),
    "speaker_resnet, attentive": Case(
        partial(SpeakerResNet, SMALL), (9, 80), {"width": 4, "pooling": "attentive"}
    ),
    "ecapa": Case(EcapaTdnn, (9, 80), {"width": 16}),
    "campplus": Case(CamPlusPlus, (9, 80)),
    "small_mlp": Case(SmallMLP, (32,)),
    "small_conv": Case(SmallConv, (3, 8, 8)),
    "stroke_net": Case(StrokeNet, (1, 24, 24), {"width": 4, "batch_norm": True}),
    "stroke_resnet": Case(StrokeResNet, (1, 24, 24), {"width": 4, "depth": 1}),
}
SLOW = {"campplus", "ecapa"}  # a hundred layers to trace


def for_names(names: Iterable[str]) -> pytest.MarkDecorator:
    marks = [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in names]
    return pytest.mark.parametrize("name", marks)


for_cases = for_names(CASES)
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def pair(name: str, backend: str = "aot_eager") -> tuple[nn.Module, nn.Module]:
    """The same network, eager and compiled."""
    case = CASES[name]
    if torch.__version__ < "2.9" and name in ("iresnet, lean", "mobilefacenet, lean"):
        pytest.skip("statistics would move twice, which is refused")
    plain = case.make(embedding_dim=8, **case.options)
    compiled = copy.deepcopy(plain)
    compiled.compile(fullgraph=True, backend=backend)
    return plain, compiled


def batch(name: str, rows: int) -> Tensor:
    return torch.randn(rows, *CASES[name].shape)


def autocast(is_half: bool) -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_half)


def train(network: nn.Module, inputs: Tensor, *, is_half: bool = False) -> tuple[Tensor, Tensor]:
    """Embeddings and the gradient of a linear function of them, with the draws of one seed."""
    network.zero_grad()
    torch.manual_seed(5)
    with autocast(is_half):
        embeddings = network(inputs)
    (embeddings * torch.randn(embeddings.shape)).sum().backward()
    gradients = [
        weight.grad.flatten() for weight in network.parameters() if weight.grad is not None
    ]
    return embeddings.detach(), torch.cat(gradients)


def num_graphs() -> int:
    return counters["stats"]["unique_graphs"]


def no_recompilation() -> Any:
    return torch._dynamo.config.patch(error_on_recompile=True)


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_every_registered_network_has_a_case():
    covered = {getattr(case.make, "func", case.make) for case in CASES.values()}
    own = [
        maker
        for name in list_backbones()
        if getattr(maker := backbones.get(name), "func", maker).__module__.startswith("qmargin.")
    ]
    assert own and {getattr(maker, "func", maker) for maker in own} == covered


@for_cases
@pytest.mark.parametrize("is_half", [False, True], ids=["float32", "bfloat16"])
def test_a_training_step_is_that_of_the_eager_network(name, is_half):
    plain, compiled = pair(name)
    inputs = batch(name, 3)
    expected, gradient = train(plain, inputs, is_half=is_half)
    found, compiled_gradient = train(compiled, inputs, is_half=is_half)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    # half-precision gradients of a tensor that is used twice are added in another order
    assert distance(compiled_gradient, gradient) < (0.02 if is_half else 1e-6)
    for (key, value), other in zip(
        compiled.state_dict().items(), plain.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(value, other, msg=lambda text, key=key: f"{key}: {text}")
    with no_recompilation():
        train(compiled, batch(name, 3), is_half=is_half)
    assert num_graphs() == 1


@for_cases
@pytest.mark.parametrize("is_half", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_one_more_graph_serves_all_other_batch_sizes(name, is_half):
    """In training and in evaluation, whose outputs are those of the eager network."""
    # without AOTAutograd, a recomputed block would move its statistics twice
    _, compiled = pair(name, "aot_eager" if "lean" in name else "eager")
    train(compiled, batch(name, 4), is_half=is_half)
    train(compiled, batch(name, 3), is_half=is_half)
    with no_recompilation():
        for rows in (2, 5, 4):
            train(compiled, batch(name, rows), is_half=is_half)
    assert num_graphs() == 2
    plain = copy.deepcopy(compiled).eval()  # a copy is not compiled
    compiled.eval()
    with torch.no_grad(), autocast(is_half):
        for rows in (4, 3, 6, 1):
            inputs = batch(name, rows)
            torch.testing.assert_close(compiled(inputs), plain(inputs))
    assert not counters["graph_break"]
    assert num_graphs() <= 5  # in evaluation: any batch, perhaps after one size alone; one row


@pytest.mark.parametrize("name", ["iresnet", "speaker_resnet"])
def test_smaller_batches_have_the_gradient_of_the_eager_network(name):
    plain, compiled = pair(name)
    for rows in (4, 3, 2):
        inputs = batch(name, rows)
        for found, expected in zip(train(compiled, inputs), train(plain, inputs), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["iresnet", "mobilefacenet, lean", "vit"])
def test_channels_last_is_compiled_too(name):
    plain, compiled = pair(name)
    for network in (plain, compiled):
        network.to(memory_format=torch.channels_last)
    inputs = batch(name, 2).to(memory_format=torch.channels_last)
    for found, expected in zip(train(compiled, inputs), train(plain, inputs), strict=True):
        assert distance(found, expected) < 1e-5
    assert num_graphs() == 1


def test_statistics_that_would_move_twice_are_refused(monkeypatch):
    monkeypatch.setattr(layers, "_MOVES_STATISTICS_TWICE", True)
    case = CASES["iresnet, lean"]
    network = case.make(embedding_dim=8, **case.options)
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"torch 2\.9; switch it"):
        compiled(torch.randn(2, *FACE))
    with torch.no_grad():
        assert compiled(torch.randn(2, *FACE)).shape == (2, 8)


@pytest.mark.slow
@pytest.mark.parametrize("name", list_backbones())
def test_every_registered_name_is_one_graph(name):
    """In the published size; nothing is computed."""
    network = create_backbone(name, embedding_dim=8)
    shape = {
        "small_mlp": (32,),
        "small_conv": (3, 8, 8),
        "stroke_net": (1, 24, 24),
        "stroke_resnet": (1, 24, 24),
    }.get(name, (2000,) if isinstance(network, SpeakerResNet | EcapaTdnn | CamPlusPlus) else FACE)
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., list[Tensor]]:
        graphs.append(graph)
        return lambda *_: [torch.zeros(2, 8)] * len(graph.graph.output_node().args[0])

    for training in (True, False):
        for is_half in (False, True):
            torch.compiler.reset()
            compiled = torch.compile(network.train(training), fullgraph=True, backend=backend)
            with autocast(is_half):
                assert compiled(torch.randn(2, *shape)).shape == (2, 8)
    assert len(graphs) == 4


WRONG: dict[str, tuple[tuple[int, ...], ...]] = {
    "iresnet": ((2, 3, 100, 100), (3, 112, 112)),
    "mobilefacenet": ((2, 1, 112, 112),),
    "vit": ((2, 3, 112, 96),),
    "speaker_resnet": ((2, 300), (2, 1000), (2, 8, 80), (2, 9, 40), (4000,)),
    "ecapa": ((2, 8, 80),),
    "campplus": ((2, 9, 40),),
    "small_mlp": ((2, 31), (32,)),
    "small_conv": ((2, 1, 8, 8),),
    "stroke_net": ((2, 3, 24, 24),),
}


@pytest.mark.parametrize("is_first", [True, False], ids=["first", "later"])
@for_names(WRONG)
def test_wrong_shapes_have_the_error_of_the_eager_network(name, is_first):
    """Also after a right one, when the compiler takes sizes as unknown; right ones go on."""
    plain, compiled = pair(name, "eager")
    if not is_first:
        compiled(batch(name, 2))
    for shape in WRONG[name]:
        messages = []
        for network in (plain, compiled):
            with pytest.raises(ShapeError) as caught:
                network(torch.randn(shape))
            messages.append(str(caught.value).partition("\n")[0])  # old compilers add lines
        assert messages[0] == messages[1] and str(shape) in messages[0]
    assert compiled(batch(name, 2)).shape == (2, 8)


def test_a_wrong_dtype_has_the_error_of_the_eager_network():
    bank = FilterBank()
    compiled = torch.compile(bank, fullgraph=True, backend="eager")
    for network in (bank, compiled):
        with pytest.raises(ShapeError, match=r"shape \(1, 400\) and torch.int16; give floating"):
            network(torch.zeros(1, 400).short())
    bank.half()
    for network in (bank, compiled):
        with pytest.raises(ConfigError, match=r"cast to torch.float16; keep it in float32"):
            network(torch.zeros(1, 400))


def test_errors_do_not_wait_for_a_graph_outside_the_compiler():
    """On the meta device and in an export nothing would ever run."""
    with torch.device("meta"):
        network = SmallConv(8)
        with pytest.raises(ShapeError, match="this network takes"):
            network(torch.empty(2, 1, 8, 8))
    with pytest.raises(ShapeError, match="takes images"):
        torch.export.export(SmallConv(8), (torch.zeros(2, 1, 8, 8),), strict=False)


def test_filter_banks_of_all_lengths_are_two_graphs():
    bank = FilterBank(subtract_mean=True)
    compiled = torch.compile(bank, fullgraph=True, backend="aot_eager")
    for length in (4000, 4321):
        torch.testing.assert_close(compiled(torch.ones(2, length)), bank(torch.ones(2, length)))
    with no_recompilation():
        for length in (560, 16000, 160 * 700 + 400):  # two frames to more than a block of them
            samples = torch.randn(2, length)
            torch.testing.assert_close(compiled(samples), bank(samples))
    assert num_graphs() == 2


def test_the_power_spectrum_as_an_operator():
    frames = torch.randn(2, 3, 25, dtype=torch.float64, requires_grad=True)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(_power_operator, (frames, 32), test_utils=tests)
    assert torch.autograd.gradcheck(partial(_power_operator, fft_size=32), frames)
    weights = torch.randn(2, 3, 17, dtype=torch.float64)
    gradients = [
        torch.autograd.grad((function(frames, 32) * weights).sum(), frames)[0]
        for function in (power_spectrum, _power_operator)
    ]
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@needs_compiler
@pytest.mark.parametrize("name", ["vit", "speaker_resnet"])
def test_the_default_compiler_gives_the_gradients_of_the_eager_network(name):
    plain, compiled = pair(name, "inductor")
    for network in (plain, compiled):
        for module in network.modules():  # other draws than those of eager networks
            if hasattr(module, "rate"):
                module.rate = 0.0
        if isinstance(network, VisionTransformer):
            network.mask_ratio = 0.0
    for rows in (3, 2):  # the second graph is for any batch size
        inputs = batch(name, rows)
        (found, gradient), (expected, eager_gradient) = (
            train(network, inputs) for network in (compiled, plain)
        )
        assert distance(found, expected) < 1e-4
        assert distance(gradient, eager_gradient) < 1e-2  # a ReLU at zero; as far from float64
    wrong = torch.randn(WRONG[name][0])
    with pytest.raises(ShapeError, match=r"takes|tile"):
        compiled(wrong)
