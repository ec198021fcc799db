"""NPI, linear regression and top-k counts against float64 oracles; each image once on any number of ranks."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fastsuncet.config import ConfigErrors
from fastsuncet.data.dataset import Images, open_images
from fastsuncet.distributed.launch import Place
from fastsuncet.errors import NumericalError
from fastsuncet.evaluation import npi as npi_module
from fastsuncet.evaluation.accuracy import accuracy
from fastsuncet.evaluation.features import embed_views, outputs
from fastsuncet.evaluation.knn import knn
from fastsuncet.evaluation.linear import fit_linear, linear
from fastsuncet.evaluation.neighbours import knn_predict
from fastsuncet.evaluation.npi import npi, npi_probabilities
from fastsuncet.evaluation.scoring import correct_in_top, standard_error, supports, true_labels
from fastsuncet.models.resnet import build_model
from pipelines.data_errors import BadImage, DataError
from pipelines.datasets.label_splits import labeled_split
from tests.support.pictures import write_pictures
from tests.support.ranks import run_ranks
from tests.support.runs import small_config
from tests.support.vectors import load_vectors

CPU = torch.device("cpu")
ALONE = Place(0, 1, 0, CPU)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------------------------------------------------- npi
def npi_in_words(queries, supports, labels, classes, temperature) -> list[list[float]]:
    """Appendix G and the p(z_j | z) of section 3, one number at a time in Python's floats."""
    rows = []
    for z in queries.tolist():
        weights = []
        for s in supports.tolist():
            dot = math.fsum(a * b for a, b in zip(z, s))
            norms = math.sqrt(math.fsum(a * a for a in z)) * math.sqrt(math.fsum(b * b for b in s))
            weights.append(math.exp(dot / norms / temperature))
        total = math.fsum(weights)
        rows.append(
            [math.fsum(w for w, c in zip(weights, labels.tolist()) if c == k) / total for k in range(classes)]
        )
    return rows


@pytest.mark.parametrize("temperature", [0.1, 0.5, 0.02])
@pytest.mark.parametrize(("at_a_time", "summed"), [(1 << 26, 4096), (50, 4), (1, 1)])
def test_npi_is_the_papers_sum_of_a_softmax(temperature, at_a_time, summed, monkeypatch):
    monkeypatch.setattr(npi_module, "AT_A_TIME", at_a_time)
    monkeypatch.setattr(npi_module, "CLASSES_SUMMED", summed)
    queries, supports_ = drawn(7, 5) * 3, drawn(23, 5, seed=1)
    labels = torch.randint(0, 6, (23,), generator=torch.Generator().manual_seed(2))
    labels[labels == 3] = 4  # a class without supports
    wanted = npi_in_words(queries.double(), supports_.double(), labels, 6, temperature)
    found = npi_probabilities(queries, supports_, labels, 6, temperature)
    assert found.dtype == torch.float32 and (found[:, 3] == 0).all()
    np.testing.assert_allclose(found.numpy(), wanted, rtol=2e-4, atol=1e-7)


def test_npi_agrees_with_the_authors_vectors():
    v = {name: torch.from_numpy(array) for name, array in load_vectors("vectors_npi").items()}
    found = npi_probabilities(v["query"], v["support"], v["support_labels"], 4, 0.1)
    torch.testing.assert_close(found, v["probs"], rtol=1e-5, atol=1e-6)


@given(st.integers(1, 12), st.integers(1, 4), st.integers(0, 10_000))
@settings(max_examples=40)
def test_npi_is_a_distribution_that_knows_neither_order_nor_scale_of_its_supports(n, classes, seed):
    generator = torch.Generator().manual_seed(seed)
    supports_, queries = torch.randn(n, 3, generator=generator), torch.randn(4, 3, generator=generator)
    labels = torch.randint(0, classes, (n,), generator=generator)
    p = npi_probabilities(queries, supports_, labels, classes, 0.1)
    torch.testing.assert_close(p.sum(1), torch.ones(4))
    order = torch.randperm(n, generator=generator)
    q = npi_probabilities(7 * queries, 0.1 * supports_[order], labels[order], classes, 0.1)
    torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


def test_views_of_an_image_join_the_supports():
    views, labels, queries = drawn(10, 3, 4), torch.arange(10) % 4, drawn(6, 4, seed=5)
    joined = npi_probabilities(queries, views.flatten(0, 1), labels.repeat_interleave(3), 4, 0.1)
    each = [npi_in_words(queries, views[:, v], labels, 4, 0.1) for v in range(3)]
    # By hand: each view's own softmax, weighed by its share of all the similarity there is.
    totals = np.stack(
        [
            torch.exp(nn.functional.cosine_similarity(queries[:, None], views[None, :, v], dim=2) / 0.1).sum(
                1
            )
            for v in range(3)
        ]
    )
    mixed = (np.array(each) * (totals / totals.sum(0))[:, :, None]).sum(0)
    np.testing.assert_allclose(joined.numpy(), mixed, rtol=1e-4, atol=1e-6)


# ---------------------------------------------------------------------------------------------------------- linear
@pytest.mark.parametrize("strength", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("classes", [3, 5])
def test_the_linear_fit_is_scikit_learns(strength, classes):
    sklearn = pytest.importorskip("sklearn.linear_model")
    features, labels = drawn(80, 6) * torch.tensor([1, 10, 0.1, 1, 1, 0]) + 3, torch.arange(80) % classes
    features[:, 0] += labels
    fitted = fit_linear(features, labels, classes, strength=strength)
    assert fitted.converged and fitted.iterations > 3
    x = features.double().numpy()
    standard = (x - x.mean(0)) / (x.std(0) + 1e-6)
    oracle = sklearn.LogisticRegression(C=strength, tol=1e-8, max_iter=10_000).fit(standard, labels.numpy())
    np.testing.assert_allclose(fitted.weight, oracle.coef_, atol=2e-3)
    queries = drawn(40, 6, seed=9) * 2 + 3
    ours = fitted.scores(queries).softmax(1)
    theirs = oracle.predict_proba((queries.double().numpy() - x.mean(0)) / (x.std(0) + 1e-6))
    np.testing.assert_allclose(ours, theirs, atol=1e-3)


def test_the_fit_in_float32_and_in_pieces_is_the_fit_in_float64(monkeypatch):
    from fastsuncet.evaluation import linear as module

    features, labels = drawn(70, 8), torch.arange(70) % 3
    whole = fit_linear(features, labels, 3)
    monkeypatch.setattr(module, "ROWS", 16)
    torch.testing.assert_close(fit_linear(features, labels, 3).weight, whole.weight, rtol=0, atol=1e-5)
    monkeypatch.setattr(module, "DOUBLE_BYTES", 0)
    single = fit_linear(features, labels, 3)
    assert single.weight.dtype == torch.float32 and single.converged
    torch.testing.assert_close(single.weight.double(), whole.weight, rtol=0, atol=1e-3)


def test_a_fit_that_ran_out_of_iterations_says_so():
    fitted = fit_linear(drawn(60, 8), torch.arange(60) % 3, 3, max_iterations=2)
    assert not fitted.converged and fitted.gradient > fitted.tolerance and fitted.iterations == 2


def test_the_fit_is_the_same_to_the_bit_again():
    features, labels = drawn(60, 8), torch.arange(60) % 3
    assert torch.equal(fit_linear(features, labels, 3).weight, fit_linear(features, labels, 3).weight)


# --------------------------------------------------------------------------------------------------------- counting
@given(st.integers(1, 8), st.integers(1, 8), st.integers(0, 10_000))
def test_top_k_counts_what_a_stable_sort_would(rows, classes, seed):
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, 4, (rows, classes))  # many ties
    truth = rng.integers(0, classes, rows)
    order = np.argsort(-scores, axis=1, kind="stable")
    wanted = [sum(t in row[:k] for t, row in zip(truth, order)) for k in (1, 5)]
    assert correct_in_top(torch.tensor(scores).float(), torch.tensor(truth)).tolist() == wanted


def test_scores_that_are_no_numbers_are_an_error_and_not_an_accuracy():
    with pytest.raises(NumericalError):
        correct_in_top(torch.tensor([[float("nan"), 1.0]]), torch.tensor([0]))


def test_the_standard_error_is_the_binomials():
    assert standard_error(0.5, 10_000) == pytest.approx(0.005)
    assert standard_error(1.0, 7) == 0


# ------------------------------------------------------------------------------------------------------ real pixels
class Colour(nn.Module):
    """The mean blue, green and red of an image, in order of the classes: each picture has most of its own."""

    def forward(self, images):
        return images.mean((2, 3)).flip(1)


def colours(folder, train=(5, 6, 7), validation=(3, 4, 4), split="all", **options):
    """Images of three colours as files, with noise; a config that reads them, and the index of both."""
    from PIL import Image

    from fastsuncet.config import load_config

    rng = np.random.default_rng(0)
    for part, counts in (("train", train), ("val", validation)):
        for c, count in enumerate(counts):
            (folder / part / "rgb"[c]).mkdir(parents=True, exist_ok=True)
            for i in range(count):
                pixels = rng.integers(0, 60, (24 + i, 30, 3))
                pixels[:, :, c] += 150
                Image.fromarray(pixels.astype(np.uint8)).save(folder / part / "rgb"[c] / f"{i}.png")
    text = (
        f"data: {{kind: image_folder, root: {folder}, decode_threads: 1, split: {{kind: {split}}}, "
        "augmentation: {size: 16, blur: 0.0}}\n"
        "criterion: {temperature: 0.1, unsupervised_batch_size: 6}\n"
        "optimization: {epochs: 1, lr: 1.0}\n"
        "model: {name: resnet_tiny}\n"
        f"logging: {{folder: {folder / 'runs'}}}\n"
    )
    (folder / "colours.yaml").write_text(text)
    config = load_config(folder / "colours.yaml", [f"{key}={value}" for key, value in options.items()])
    return config


def everything(rank: int, world_size: int, folder: str) -> list:
    """All evaluations on this rank: of colours (which anything tells apart), and of an untrained encoder."""
    from pathlib import Path

    place = Place(rank, world_size, rank, CPU)
    config = colours_of(Path(folder))
    images = open_images(config, place, validation=True)
    by_colour = [run(Colour(), images, config, place).metrics["top1"] for run in (knn, npi, linear, accuracy)]
    network = build_model("resnet_tiny", seed=1).encoder
    chance = [run(network, images, config, place).metrics for run in (knn, npi, linear)]
    views = embed_views(network, images.train, images.split.indices, 2, config, place, batch=7)
    return [by_colour, chance, views]


def colours_of(folder):
    return load_colours(folder, "npi.views=2", "evaluation.knn_k=3")


def load_colours(folder, *overrides):
    from fastsuncet.config import load_config

    return load_config(folder / "colours.yaml", overrides)


def test_separable_images_are_all_right_and_ranks_count_each_once_however_ragged(tmp_path):
    colours(tmp_path)  # 11 validation images: 4, 4 and 3 on three ranks
    by_colour, chance, views = everything(0, 1, str(tmp_path))
    assert by_colour == [1.0, 1.0, 1.0, 1.0]
    assert views.shape == (18, 2, 64)
    for theirs in run_ranks(everything, 3, str(tmp_path)):
        assert theirs[0] == by_colour
        for one, other in zip(chance, theirs[1]):
            assert other == pytest.approx(one, abs=1e-12)
        torch.testing.assert_close(theirs[2], views, rtol=1e-5, atol=1e-6)


def test_neighbours_are_sought_among_the_very_views_that_npi_sums_over(tmp_path, monkeypatch):
    """Appendix G crops and flips the labeled images at random before it compares its two classifiers."""
    config = colours(tmp_path)
    images = open_images(config, ALONE, validation=True)
    network = build_model("resnet_tiny", seed=1).encoder
    seen = []

    def watched(rows, columns, *arguments, **options):
        seen.append(columns)
        return knn_predict(rows, columns, *arguments, **options)

    monkeypatch.setattr("fastsuncet.evaluation.knn.knn_predict", watched)
    measured = knn(network, images, config, ALONE)
    views = embed_views(network, images.train, images.split.indices, 1, config, ALONE)
    assert torch.equal(seen[0], views[:, 0]) and torch.equal(seen[1], views[:, 0])
    assert measured.setting == {"k": 10, "seed": 0} and measured.notes == ()


def test_more_neighbours_than_there_are_labeled_images_is_said(tmp_path):
    config = colours(tmp_path, **{"evaluation.knn_k": "30"})
    measured = knn(Colour(), open_images(config, ALONE, validation=True), config, ALONE)
    assert measured.notes == ("all 18 labeled images vote: there are no 30",)


def test_an_accuracy_is_a_whole_number_of_the_images(tmp_path):
    config = colours(tmp_path)
    images = open_images(config, ALONE, validation=True)
    measured = npi(build_model("resnet_tiny", seed=1).encoder, images, config, ALONE)
    assert measured.images == 11
    assert 11 * measured.metrics["top1"] == pytest.approx(round(11 * measured.metrics["top1"]))
    assert measured.metrics["top5"] == 1.0  # of three classes
    assert measured.setting == {"temperature": 0.1, "views": 1, "seed": 0}


def test_a_support_view_is_the_same_in_any_batch_and_of_any_number_of_views(tmp_path):
    config = colours(tmp_path)
    images = open_images(config, ALONE, validation=True)
    network, chosen = Colour(), np.array([3, 1, 8, 2, 17])
    two = embed_views(network, images.train, chosen, 2, config, ALONE, batch=2)
    one = embed_views(network, images.train, chosen, 1, config, ALONE)
    assert torch.equal(one[:, 0], two[:, 0])
    assert not torch.equal(two[:, 0], two[:, 1])


def test_support_views_are_crops_and_flips_of_unchanged_colour(tmp_path):
    """Each pixel of a crop lies between the darkest and brightest of its image: a jittered one does not."""
    index = write_pictures(tmp_path / "pictures", count=4, side=40)
    config = small_config(tmp_path, "data.augmentation.strength=1.0", "data.augmentation.grey=1.0")
    spread = lambda x: torch.stack([x.amin((2, 3)), x.amax((2, 3))], 2).flatten(1)  # noqa: E731
    network = nn.Module()
    network.forward = spread
    crops = embed_views(network, index, np.arange(4), 8, config, ALONE)  # (4, 8, 6)
    from PIL import Image

    for i in range(4):
        pixels = np.asarray(Image.open(index.path(i))).reshape(-1, 3) / 255
        low, high = pixels.min(0) - 0.02, pixels.max(0) + 0.02
        shown = crops[i].numpy().reshape(8, 3, 2)
        assert (shown[:, :, 0] >= low).all() and (shown[:, :, 1] <= high).all()
        assert np.abs(shown[:, 0] - shown[:, 2]).max() > 0.02  # and not grey


def test_the_network_comes_back_in_the_mode_it_had_with_its_statistics(tmp_path):
    config = colours(tmp_path)
    images = open_images(config, ALONE, validation=True)
    network = build_model("resnet_tiny").encoder.train()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    outputs(network, images.validation, np.arange(5), config, ALONE)
    assert network.training
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


# ------------------------------------------------------------------------------------------------------ wrong inputs
def test_a_split_without_labels_is_the_configs_fault(tmp_path):
    config = colours(tmp_path, split="none")
    images = open_images(config, ALONE, validation=True)
    for run in (knn, npi, linear):
        with pytest.raises(
            ConfigErrors, match=r"colours\.yaml:1: .*split\.kind: none(?s:.*)data\.split\.kind=all"
        ):
            run(Colour(), images, config, ALONE)


def test_a_class_without_a_labeled_image_is_named(tmp_path):
    config = colours(tmp_path)
    images = open_images_with(config, ["r/0.png", "b/1.png"], tmp_path)
    with pytest.raises(
        DataError, match=r"1 of 3 classes have no labeled training image \(g\).* 4 validation"
    ):
        supports(images, config)


def open_images_with(config, names, folder):
    from pipelines.datasets.folders import image_folder

    (folder / "names.txt").write_text("\n".join(names) + "\n")
    train, validation = (image_folder(folder / part) for part in ("train", "val"))
    return Images(train, labeled_split(train, "names", file=folder / "names.txt"), validation)


def test_a_validation_image_without_a_label_is_named(tmp_path):
    config = colours(tmp_path)
    images = open_images(config, ALONE, validation=True)
    images.validation.labels[3] = -1
    with pytest.raises(DataError, match=r"1 of the 11 validation images have no label \(b/3\.png\)"):
        true_labels(images, ALONE)


def test_a_kept_validation_index_takes_the_numbers_of_the_training_classes_at_hand(tmp_path):
    import shutil

    config = colours(tmp_path)
    open_images(config, ALONE, validation=True)
    shutil.copytree(tmp_path / "train", tmp_path / "more")
    shutil.copytree(tmp_path / "train" / "r", tmp_path / "more" / "a")  # b, g, r become 1, 2, 3
    images = open_images(colours(tmp_path, **{"data.train": "more"}), ALONE, validation=True)
    assert images.validation.classes == images.train.classes == ("a", "b", "g", "r")
    for i, label in enumerate(images.validation.labels):
        assert images.validation.classes[label] == images.validation.name(i)[0]

    shutil.rmtree(tmp_path / "more" / "g")
    (tmp_path / "more").rename(tmp_path / "less")
    with pytest.raises(DataError, match=r"val has images of 1 classes that no training image has: g"):
        open_images(colours(tmp_path, **{"data.train": "less"}), ALONE, validation=True)


def test_a_folder_that_was_validated_on_has_its_own_classes_when_trained_on(tmp_path):
    import shutil

    config = colours(tmp_path)
    shutil.rmtree(tmp_path / "val" / "g")
    assert open_images(config, ALONE, validation=True).validation.classes == ("b", "g", "r")
    config = load_colours(tmp_path, "data.train=val")
    assert open_images(config, ALONE, validation=False).train.classes == ("b", "r")


@pytest.mark.parametrize("part", ["train/g/2.png", "val/b/1.png"])
@pytest.mark.parametrize("run", [knn, npi, linear])
def test_an_image_that_cannot_be_decoded_is_named(tmp_path, run, part):
    config = colours(tmp_path)
    whole = (tmp_path / part).read_bytes()
    images = open_images(config, ALONE, validation=True)
    (tmp_path / part).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadImage) as caught:
        run(Colour(), images, config, ALONE)
    assert [path for path, _ in caught.value.files] == [str(tmp_path / part)]
    assert caught.value.exit_code == 3
    assert "allow more" not in str(caught.value)  # no evaluation lets another image stand in


def test_a_classifier_of_other_classes_is_refused(tmp_path):
    config = colours(tmp_path)
    images = open_images(config, ALONE, validation=True)
    with pytest.raises(DataError, match="tells 2 classes apart and the images are of 3"):
        accuracy(nn.Sequential(Colour(), nn.Linear(3, 2)), images, config, ALONE)
