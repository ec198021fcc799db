"""The losses' matrix products in TF32: how far that moves a gradient, who gets it, and that the switch is put back."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastsuncet.config import load_config
from fastsuncet.losses import contrast, nt_xent, suncet
from fastsuncet.losses import tf32 as products
from fastsuncet.training import methods
from fastsuncet.training.multi_view_model import Outputs
from tests.support.runs import CONFIGS

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


def rows(clustered: bool) -> torch.Tensor:
    draw = torch.Generator().manual_seed(5)
    z = torch.randn(256, 128, generator=draw)
    return torch.randn(32, 128, generator=draw)[LABELS] + 0.5 * z if clustered else z


def gradient(loss, z: torch.Tensor) -> torch.Tensor:
    z = z.clone().requires_grad_()
    loss(z).backward()
    return z.grad.double()


@pytest.mark.parametrize("clustered", [False, True])
@pytest.mark.parametrize("temperature", [0.1, 0.5])
@pytest.mark.parametrize("name", ["nt_xent", "suncet"])
def test_tf32_moves_a_gradient_by_a_third_at_most_of_what_rows_in_bfloat16_do(
    clustered, temperature, name, monkeypatch
):
    monkeypatch.setattr(contrast, "COLDEST", float("inf"))  # the sweep that GPUs run
    monkeypatch.setattr(contrast.products, "are_cut", lambda factor: factor.dtype == torch.float32)

    def loss(z: torch.Tensor) -> torch.Tensor:
        return nt_xent(z, temperature) if name == "nt_xent" else suncet(z, LABELS, temperature)

    z = rows(clustered)
    exact = gradient(loss, z.double())
    with TensorCores() as seen:
        rounded_products = gradient(loss, z)
    rounded_rows = gradient(loss, z.bfloat16().double())
    assert seen.products == 6  # three a chunk of 128
    by_products, by_rows = ((g - exact).norm() / exact.norm() for g in (rounded_products, rounded_rows))
    assert by_products < by_rows / 3, f"{by_products:.1e} against {by_rows:.1e}"


def test_rounding_gives_the_nearest_number_that_a_tensor_core_can_read():
    x = torch.randn(4096, generator=torch.Generator().manual_seed(1)) * 10 ** torch.linspace(-20, 20, 4096)
    found = products.rounded(x)
    assert torch.all(found.view(torch.int32) & 0x1FFF == 0)
    assert torch.all((found.double() - x.double()).abs() <= x.double().abs() * 2**-11)
    cut = (x.view(torch.int32) & ~0x1FFF).view(torch.float32)
    assert torch.all((found.double() - x.double()).abs() <= (cut.double() - x.double()).abs())
    assert torch.equal(products.rounded(found), found)


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, 0x7FFFF000, 0x7F800001, -1, -4096, -0x3FFFFF])
def test_what_is_no_number_stays_none_whatever_its_bits(bits, monkeypatch):
    """A card's own NaN is 0x7FFFFFFF: half a last place more is a minus zero, and a diverged run would show a loss."""
    nan = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    assert nan.isnan().all() and products.rounded(nan).isnan().all()
    monkeypatch.setattr(contrast, "COLDEST", float("inf"))
    monkeypatch.setattr(contrast.products, "are_cut", lambda factor: True)
    z = rows(clustered=False)
    z[7] = nan
    assert nt_xent(z, 0.1).isnan() and suncet(z, LABELS, 0.1).isnan()


def test_the_largest_and_the_smallest_numbers_round_as_floats_do():
    largest = torch.finfo(torch.float32).max
    x = torch.tensor([torch.inf, -torch.inf, largest, -largest, 0.0, -0.0, 1e-45, -1e-41])
    found = products.rounded(x)
    assert found.tolist() == [torch.inf, -torch.inf, torch.inf, -torch.inf, 0, 0, 0, -(2.0**-136)]
    assert torch.equal(found.signbit(), x.signbit())


def inside_of(region, wanted: bool) -> None:
    with region:
        assert torch.backends.cuda.matmul.allow_tf32 == wanted
        _ = 1 / 0


def test_the_switch_is_put_back_whatever_happens_inside():
    before = torch.backends.cuda.matmul.allow_tf32
    for wanted in (True, False):
        with pytest.raises(ZeroDivisionError):
            inside_of(products.products(tf32=wanted), wanted)
        assert torch.backends.cuda.matmul.allow_tf32 == before


@pytest.mark.parametrize("supervision", ["suncet", "sup_con"])
@pytest.mark.parametrize(
    ("precision", "asked", "expected"),
    [
        ("bf16", "tf32", True),
        ("fp16", "tf32", True),
        ("fp32", "tf32", False),  # whoever asks for float32 gets it, in the losses as well
        ("bf16", "fp32", False),
    ],
)
def test_both_losses_take_tf32_only_behind_sixteen_bits_and_only_if_asked(
    supervision, precision, asked, expected, monkeypatch
):
    seen = []

    def watched(*_arguments, **_options):
        seen.append(torch.backends.cuda.matmul.allow_tf32)
        return torch.zeros(())

    for name in ("nt_xent", supervision):
        monkeypatch.setattr(methods.losses, name, watched)
    changed = [
        f"criterion.supervision={supervision}",
        f"meta.precision={precision}",
        f"criterion.products={asked}",
    ]
    config = load_config(CONFIGS / "digits_demo.yaml", changed)
    out = Outputs(torch.ones(2, 2), torch.ones(2, 2), None, None)
    methods.instance_loss(config)(out)
    methods.supervised_loss(config)(out, torch.zeros(2, dtype=torch.int64))
    assert seen == [expected, expected]
