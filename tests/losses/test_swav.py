"""SwAV's codes and swapped prediction, held to its equations in dense float64 and to its authors' numbers."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel

from fastsuncet.losses import normalise_prototypes_, prototype_scores, swav
from fastsuncet.losses.sinkhorn import sinkhorn
from tests.support import dense_losses
from tests.support.dense_losses import gradient
from tests.support.ranks import run_ranks
from tests.support.vectors import load_vectors

F64 = torch.float64
IMAGES, CROPS, PROTOTYPES, WIDTH = 6, 4, 5, 8


def _scores(crops=CROPS, images=IMAGES, prototypes=PROTOTYPES, seed=0, dtype=F64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.rand(crops * images, prototypes, dtype=F64, generator=generator) - 1).to(dtype)


# The equations


@settings(max_examples=60, deadline=None)
@given(
    crops=st.integers(2, 6),
    images=st.integers(1, 9),
    prototypes=st.integers(1, 9),
    seed=st.integers(0, 2**32),
    temperature=st.floats(0.05, 2),
    epsilon=st.floats(0.02, 1),
    iterations=st.integers(1, 5),
)
def test_swav_is_the_dense_equation_for_any_batch(
    crops, images, prototypes, seed, temperature, epsilon, iterations
):
    scores = _scores(crops, images, prototypes, seed)
    sinkhorn_settings = {"epsilon": epsilon, "iterations": iterations}
    loss, grad = gradient(swav, scores, temperature, crops=crops, **sinkhorn_settings)
    true_loss, true_grad = gradient(dense_losses.swav, scores, temperature, crops=crops, **sinkhorn_settings)
    torch.testing.assert_close(loss, true_loss, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(grad, true_grad, rtol=1e-9, atol=1e-9)


def test_swav_gives_the_numbers_of_its_authors_code():
    arrays = load_vectors("vectors_swav")
    scores, size = torch.from_numpy(arrays["scores"]), int(arrays["bs"])
    for crop in (0, 1):
        codes = sinkhorn(
            scores[crop * size :][:size], float(arrays["epsilon"]), iterations=int(arrays["iters"])
        )
        torch.testing.assert_close(codes, torch.from_numpy(arrays[f"q{crop}"]), rtol=1e-13, atol=1e-15)
    loss, grad = gradient(swav, scores, float(arrays["tau"]), crops=int(arrays["V"]))
    assert loss.item() == pytest.approx(float(arrays["loss"]), rel=1e-14)
    torch.testing.assert_close(grad, torch.from_numpy(arrays["grad_scores"]), rtol=1e-12, atol=1e-15)
    ours = prototype_scores(torch.from_numpy(arrays["emb"]), torch.from_numpy(arrays["prototypes"]))
    torch.testing.assert_close(ours, scores)


def test_float32_is_the_float64_value_to_a_hundred_thousandth():
    scores = _scores(crops=8, images=40, prototypes=300, dtype=torch.float32)
    loss, grad = gradient(swav, scores, 0.1, crops=8)
    true_loss, true_grad = gradient(dense_losses.swav, scores.double(), 0.1, crops=8)
    assert loss.dtype == grad.dtype == torch.float32
    assert loss.item() == pytest.approx(true_loss.item(), rel=1e-5)
    assert (grad - true_grad).norm() < 1e-5 * true_grad.norm()


def test_gradient_goes_to_predictions_and_never_through_codes():
    """Were the codes part of the graph, the slope with codes held still would be another one."""
    scores = _scores()
    codes = sinkhorn(scores.view(CROPS, IMAGES, PROTOTYPES)[:2])
    assert not codes.requires_grad and not sinkhorn(scores.clone().requires_grad_()).requires_grad

    def with_codes_held_still(scores):
        log_p = (scores.view(CROPS, IMAGES, PROTOTYPES) / 0.1).log_softmax(dim=-1)
        pairs = [(a, v) for a in (0, 1) for v in range(CROPS) if v != a]
        return -sum((codes[a] * log_p[v]).sum(dim=-1).mean() for a, v in pairs) / len(pairs)

    assert torch.autograd.gradcheck(with_codes_held_still, scores.clone().requires_grad_())
    loss, grad = gradient(swav, scores, 0.1, crops=CROPS)
    true_loss, true_grad = gradient(with_codes_held_still, scores)
    torch.testing.assert_close(loss, true_loss)
    torch.testing.assert_close(grad, true_grad)


def test_an_image_whose_crops_agree_costs_less_than_one_whose_crops_do_not():
    agree = torch.eye(3, dtype=F64).repeat(4, 1)
    disagree = torch.cat([torch.eye(3, dtype=F64).roll(shift, dims=1) for shift in range(4)])
    assert swav(agree, 0.1, crops=4) < 1e-3 < 1 < swav(disagree, 0.1, crops=4)


# Codes


def test_codes_of_a_sample_sum_to_one_and_prototypes_share_samples_alike_in_the_end():
    scores = _scores(crops=1, images=40, prototypes=7)
    codes = sinkhorn(scores, 0.05, iterations=3)
    assert (codes >= 0).all()
    torch.testing.assert_close(codes.sum(dim=1), torch.ones(40, dtype=F64))
    after = [(sinkhorn(scores, 0.05, n).sum(dim=0) - 40 / 7).abs().max().item() for n in (1, 3, 1000)]
    assert after[0] > after[1] > 1e-3 and after[2] < 1e-9


def test_a_prototype_that_resembles_everything_does_not_get_everything():
    scores = _scores(crops=1, images=30, prototypes=3) * 0.1
    scores[:, 0] += 0.5  # by scores alone every sample would go there
    assert (scores.argmax(dim=1) == 0).all()
    shares = sinkhorn(scores).sum(dim=0) / 30
    assert (shares - 1 / 3).abs().max() < 0.05


def test_problems_side_by_side_are_solved_as_if_alone():
    scores = torch.stack([_scores(seed=1), _scores(seed=2)])
    assert torch.equal(sinkhorn(scores), torch.stack([sinkhorn(each) for each in scores]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1, 50, 60_000])
def test_scores_of_any_size_give_codes(dtype, size):
    """exp(50 / 0.05) is e^1000, beyond float64; logarithms do not mind."""
    scores = (_scores(crops=1, images=20) * size).to(dtype)
    codes = sinkhorn(scores)
    assert codes.dtype == torch.float32 and codes.isfinite().all()
    torch.testing.assert_close(codes.sum(dim=1), torch.ones(20))
    if size == 1:
        torch.testing.assert_close(
            codes.double(), dense_losses.sinkhorn(scores.double(), 0.05, 3), rtol=1e-4, atol=1e-6
        )


# Prototypes


def test_prototypes_become_one_long_in_place_without_a_graph():
    prototypes = torch.nn.Parameter(torch.randn(7, 4))
    prototypes.data[3] = 0
    before, address = prototypes.detach().clone(), prototypes.data_ptr()
    assert normalise_prototypes_(prototypes) is prototypes and prototypes.data_ptr() == address
    lengths = torch.ones(7)
    lengths[3] = 0
    torch.testing.assert_close(prototypes.detach().norm(dim=1), lengths)
    torch.testing.assert_close(prototypes.detach() * before.norm(dim=1, keepdim=True), before)
    assert prototypes.grad_fn is None and prototypes.requires_grad


def test_scores_are_cosines_with_a_gradient_to_both_sides():
    z, prototypes = torch.randn(6, WIDTH, dtype=F64), torch.randn(3, WIDTH, dtype=F64)
    normalise_prototypes_(prototypes)
    scores = prototype_scores(z, prototypes)
    for i in range(6):
        for k in range(3):
            assert scores[i, k] == pytest.approx(
                torch.cosine_similarity(z[i], prototypes[k], dim=0).item(), rel=1e-12
            )
    assert torch.autograd.gradcheck(prototype_scores, (z.requires_grad_(), prototypes.requires_grad_()))


# What must not matter, and edges


def test_autocast_does_not_reach_in():
    z, prototypes, scores = torch.randn(12, WIDTH), torch.randn(PROTOTYPES, WIDTH), _scores().float()

    def both() -> tuple[torch.Tensor, torch.Tensor]:
        return prototype_scores(z, prototypes), swav(scores, 0.1, crops=CROPS)

    outside = both()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = both()
    for one, other in zip(outside, inside, strict=True):
        assert one.dtype == other.dtype == torch.float32 and torch.equal(one, other)
    assert torch.equal(swav(scores.half(), 0.1, crops=4), swav(scores.half().float(), 0.1, crops=4))


def test_no_image_is_zero_with_a_zero_gradient():
    loss, grad = gradient(swav, torch.zeros(0, 5), 0.1, crops=4)
    assert loss.item() == 0 and grad.shape == (0, 5)


def test_a_score_that_is_not_a_number_is_not_hidden():
    for bad in (math.nan, math.inf):
        scores = _scores()
        scores[-1, 0] = bad
        assert swav(scores, 0.1, crops=CROPS).isnan()


def test_inputs_are_left_as_they_were():
    scores = _scores()
    before = scores.clone()
    gradient(swav, scores, 0.1, crops=CROPS)
    assert torch.equal(scores, before)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_nothing_waits_for_the_device(device):
    """Fake tensors have no values: to read one, or to make a shape of one, raises. Nor do they mix devices."""
    with FakeTensorMode(allow_non_fake_inputs=False):
        z = torch.randn(CROPS * IMAGES, WIDTH, device=device, requires_grad=True)
        prototypes = torch.randn(PROTOTYPES, WIDTH, device=device, requires_grad=True)
        normalise_prototypes_(prototypes)
        loss = swav(prototype_scores(z, prototypes), 0.1, crops=CROPS)
        if device == "cpu":  # backward needs a real CUDA context even for fake tensors
            loss.backward()


# What a person is told


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scores": torch.zeros(8)}, "must be (crops x images, prototypes)"),
        ({"scores": torch.zeros(8, 3, dtype=torch.int64)}, "not (8, 3) of torch.int64"),
        ({"scores": torch.zeros(8, 0)}, "not (8, 0)"),
        ({"scores": torch.zeros(9, 3)}, "9 rows are no multiple of 4"),
        ({"crops": 1}, "crops must be at least 2"),
        ({"temperature": 0.0}, "temperature must be a plain number above 0"),
        ({"epsilon": -0.05}, "epsilon must be a plain number above 0"),
        ({"epsilon": math.nan}, "epsilon must be a plain number above 0"),
        ({"iterations": 0}, "iterations must be at least 1"),
    ],
)
def test_what_cannot_be_used_is_said_in_words(change, words):
    call = {"scores": torch.zeros(8, 3), "temperature": 0.1, "crops": 4, **change}
    with pytest.raises(ValueError, match=r"^swav: ") as refusal:
        swav(**call)
    assert words in str(refusal.value)


# Real ranks


def _rank_scores(rank: int) -> torch.Tensor:
    return _scores(seed=10 + rank)


class _Scorer(torch.nn.Module):
    """A network and its prototypes, as training has them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.trunk = torch.nn.Linear(PROTOTYPES, WIDTH).double()
        self.prototypes = torch.nn.Parameter(torch.randn(7, WIDTH, dtype=F64))
        normalise_prototypes_(self.prototypes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return prototype_scores(self.trunk(x), self.prototypes)


def _on_one_rank(rank: int, world_size: int) -> dict:
    scores = _rank_scores(rank)
    told = {"codes": sinkhorn(scores[:IMAGES]), "swav": gradient(swav, scores, 0.1, crops=CROPS)}
    network = DistributedDataParallel(_Scorer())
    loss = swav(network(scores), 0.1, crops=CROPS)
    loss.backward()
    told["step"] = (loss.detach(), torch.cat([p.grad.flatten() for p in network.parameters()]))
    with pytest.raises(ValueError) as refusal:
        swav(scores[: 8 + 4 * (rank == 1)], 0.1, crops=4)
    told["refusal"] = str(refusal.value)
    odd_ranks = torch.distributed.new_group(range(1, world_size, 2))
    if rank % 2:
        told["odd codes"] = sinkhorn(scores[:IMAGES], group=odd_ranks)
    return told


@pytest.fixture(scope="module")
def told_by() -> dict[int, list[dict]]:
    return {world_size: run_ranks(_on_one_rank, world_size) for world_size in (2, 4)}


def _joined(world_size: int) -> torch.Tensor:
    """One process has crop 0 of all images, then crop 1 of all."""
    by_rank = torch.stack([_rank_scores(r).view(CROPS, IMAGES, PROTOTYPES) for r in range(world_size)])
    return by_rank.transpose(0, 1).reshape(-1, PROTOTYPES)


worlds = pytest.mark.parametrize("world_size", [2, 4])


@worlds
def test_codes_on_ranks_equal_those_of_one_process_on_the_joined_batch(told_by, world_size):
    codes = dense_losses.sinkhorn(_joined(world_size)[: world_size * IMAGES], 0.05, 3)
    torch.testing.assert_close(
        torch.cat([told["codes"] for told in told_by[world_size]]), codes, rtol=1e-12, atol=1e-14
    )


@worlds
def test_the_loss_on_ranks_equals_that_of_one_process_on_the_joined_batch(told_by, world_size):
    loss, grad = gradient(dense_losses.swav, _joined(world_size), 0.1, crops=CROPS)
    shares = torch.stack([told["swav"][0] for told in told_by[world_size]])
    assert shares.mean().item() == pytest.approx(loss.item(), rel=1e-13)
    grad = grad.view(CROPS, world_size, IMAGES, PROTOTYPES).transpose(0, 1)
    for r, told in enumerate(told_by[world_size]):
        torch.testing.assert_close(
            told["swav"][1].view_as(grad[r]) / world_size, grad[r], rtol=1e-11, atol=1e-14
        )


@worlds
def test_ddp_gives_network_and_prototypes_the_gradient_of_one_process(told_by, world_size):
    network = _Scorer()
    loss = swav(network(_joined(world_size)), 0.1, crops=CROPS)
    loss.backward()
    grad = torch.cat([p.grad.flatten() for p in network.parameters()])
    shares = torch.stack([told["step"][0] for told in told_by[world_size]])
    assert shares.mean().item() == pytest.approx(loss.item(), rel=1e-13)
    for told in told_by[world_size]:
        assert (told["step"][1] - grad).norm() <= 1e-12 * grad.norm()


@worlds
def test_ranks_with_different_shapes_are_all_told_so(told_by, world_size):
    for told in told_by[world_size]:
        assert told["refusal"].startswith("swav: the shape of its input")
        assert "rank 0: (8, 5), rank 1: (12, 5)" in told["refusal"]


def test_a_group_balances_its_own_ranks_only(told_by):
    joined = torch.cat([_rank_scores(r)[:IMAGES] for r in (1, 3)])
    codes = torch.cat([told_by[4][r]["odd codes"] for r in (1, 3)])
    torch.testing.assert_close(codes, dense_losses.sinkhorn(joined, 0.05, 3), rtol=1e-12, atol=1e-14)
