"""Matrix products of the losses in TF32: how far they move a gradient, rounding, and torch's switch."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fastsuncet import nt_xent, suncet
from fastsuncet.commands.api import in_a_callers_process
from fastsuncet.config import load_config
from fastsuncet.losses import contrast
from fastsuncet.training import methods
from fastsuncet.training.multi_view_model import Outputs
from tests.support.dense_losses import gradient

LABELS = torch.arange(256) // 8


class TensorCores(TorchDispatchMode):
    """Cuts the factors of float32 products down to TF32's 10 bits of mantissa, as a tensor core reads them."""

    def __init__(self):
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            self.products += 1
            factors = [(x.view(torch.int32) & ~0x1FFF).view(torch.float32) for x in args[-2:]]
            args = (*args[:-2], *factors)
        return operator(*args, **(kwargs or {}))


def draw_rows(clustered: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    z = torch.randn(256, 128, generator=generator)
    return torch.randn(32, 128, generator=generator)[LABELS] + 0.5 * z if clustered else z


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """The sweep that GPUs run, with TF32 on."""
    monkeypatch.setattr(contrast, "LOWEST_TEMPERATURE", float("inf"))
    monkeypatch.setattr(contrast, "uses_tf32", lambda factor: factor.dtype == torch.float32)


@pytest.mark.parametrize("clustered", [False, True])
@pytest.mark.parametrize("temperature", [0.1, 0.5])
@pytest.mark.parametrize("name", ["nt_xent", "suncet"])
def test_tf32_moves_a_gradient_less_than_bfloat16_rows_do(clustered, temperature, name, as_on_a_gpu):
    loss, arguments = (nt_xent, ()) if name == "nt_xent" else (suncet, (LABELS,))
    z = draw_rows(clustered)
    _, exact = gradient(loss, z.double(), *arguments, temperature)
    with TensorCores() as seen:
        _, rounded_products = gradient(loss, z, *arguments, temperature)
    _, rounded_rows = gradient(loss, z.bfloat16().double(), *arguments, temperature)
    assert seen.products == 6  # three per chunk of 128
    by_products, by_rows = ((g - exact).norm() / exact.norm() for g in (rounded_products, rounded_rows))
    assert by_products < by_rows / 3, f"{by_products:.1e} against {by_rows:.1e}"


def test_rounded_gives_the_nearest_tf32_number():
    x = torch.randn(4096, generator=torch.Generator().manual_seed(1)) * 10 ** torch.linspace(-20, 20, 4096)
    found = contrast.rounded_to_tf32(x)
    assert torch.all(found.view(torch.int32) & 0x1FFF == 0)
    assert torch.all((found.double() - x.double()).abs() <= x.double().abs() * 2**-11)
    cut = (x.view(torch.int32) & ~0x1FFF).view(torch.float32)
    assert torch.all((found.double() - x.double()).abs() <= (cut.double() - x.double()).abs())
    assert torch.equal(contrast.rounded_to_tf32(found), found)


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, 0x7FFFF000, 0x7F800001, -1, -4096, -0x3FFFFF])
def test_rounded_keeps_nan(bits, as_on_a_gpu):
    """A GPU's own NaN is 0x7FFFFFFF: half a last place more is -0, and a diverged run would show a loss."""
    nan = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    assert nan.isnan().all() and contrast.rounded_to_tf32(nan).isnan().all()
    z = draw_rows(clustered=False)
    z[7] = nan
    assert nt_xent(z, 0.1).isnan() and suncet(z, LABELS, 0.1).isnan()


def test_rounded_takes_the_largest_and_smallest_numbers():
    largest = torch.finfo(torch.float32).max
    x = torch.tensor([torch.inf, -torch.inf, largest, -largest, 0.0, -0.0, 1e-45, -1e-41])
    found = contrast.rounded_to_tf32(x)
    assert found.tolist() == [torch.inf, -torch.inf, torch.inf, -torch.inf, 0, 0, 0, -(2.0**-136)]
    assert torch.equal(found.signbit(), x.signbit())


@pytest.mark.parametrize(("name", "value"), [("allow_tf32", True), ("fp32_precision", "tf32")])
def test_uses_tf32_reads_the_switch_by_both_of_its_names(name, value):
    with in_a_callers_process(), FakeTensorMode():
        x = torch.empty(1, device="cuda")
        assert not contrast.uses_tf32(x)
        setattr(torch.backends.cuda.matmul, name, value)
        assert contrast.uses_tf32(x) and not contrast.uses_tf32(x.double())


@pytest.mark.parametrize(
    ("precision", "products", "expected"),
    [("bf16", "tf32", True), ("fp16", "tf32", True), ("fp32", "tf32", False), ("bf16", "fp32", False)],
)
def test_products_in_tf32_only_behind_16_bits(precision, products, expected, monkeypatch):
    """fp32 training gets float32 in the losses too. Whatever a loss ends with, the switch is restored."""
    before, seen = torch.backends.cuda.matmul.allow_tf32, []

    def watched(*_arguments, **_options):
        seen.append(torch.backends.cuda.matmul.allow_tf32)
        raise ZeroDivisionError

    for name in ("nt_xent", "suncet"):
        monkeypatch.setattr(f"fastsuncet.losses.{name}.{name}", watched)
    changes = [f"criterion.products={products}", f"meta.precision={precision}"]
    out = Outputs(torch.ones(2, 2), torch.ones(2, 2), None, None)
    for loss in methods.losses(load_config("digits_demo", changes)):
        with pytest.raises(ZeroDivisionError):
            loss(out, torch.zeros(2, dtype=torch.int64))
        assert torch.backends.cuda.matmul.allow_tf32 == before
    assert seen == [expected, expected]
