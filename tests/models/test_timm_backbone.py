"""timm's backbones by name: the cost that others publish, weights from the seed, and a run from start to export."""

import pytest
import timm
import torch
import torchvision

from fastsuncet.commands.export import export
from fastsuncet.errors import ConfigError
from fastsuncet.evaluation.encoder import load_encoder
from fastsuncet.models import timm_backbone
from fastsuncet.models.flops import network_cost
from fastsuncet.models.resnet import build_model, width_of
from fastsuncet.models.sync_batchnorm import synchronize
from tests.support.runs import assert_continues, small_config

WEIGHTS = torchvision.models
PUBLISHED = {
    "convnext_tiny": WEIGHTS.ConvNeXt_Tiny_Weights.IMAGENET1K_V1,
    "vit_base_patch16_224": WEIGHTS.ViT_B_16_Weights.IMAGENET1K_V1,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_timm_backbone_costs_what_torchvision_publishes(name):
    """torchvision publishes GMACs to three decimals, with the classifier of 1,000 classes."""
    macs = network_cost(f"timm/{name}", "imagenet", 224).encoder_macs + 1000 * width_of(f"timm/{name}")
    assert macs / 1e9 == pytest.approx(PUBLISHED[name].meta["_ops"], abs=6e-4)


def test_timm_backbone_draws_nothing_in_training():
    """Else a resumed step, or one in pieces, would be another: ghostnet drops features, swin drops blocks."""
    network = build_model("timm/ghostnet_050").encoder
    images = torch.rand(2, 3, 32, 32)
    assert torch.equal(network(images), network(images))
    swin = build_model("timm/swin_tiny_patch4_window7_224", device="meta")
    assert not any(getattr(module, "drop_prob", 0) for module in swin.modules())


def test_timm_backbone_suggests_the_nearest_name():
    with pytest.raises(ConfigError, match=r"no network convnext_tyny; did you mean timm/convnext_tiny"):
        build_model("timm/convnext_tyny", device="meta")


@pytest.mark.parametrize("name", ["timm/mixer_s32_224", "timm/levit_128s"])
def test_timm_backbone_of_one_size_refuses_another(name):
    with pytest.raises(ConfigError, match=f"{name} does not take images of 64 pixels: "):
        network_cost(name, "imagenet", 64)


def test_timm_backbone_that_gives_no_vector_is_refused(monkeypatch):
    network = torch.nn.Identity()
    network.pretrained_cfg = {"input_size": (3, 8, 8)}
    monkeypatch.setattr(timm_backbone, "create", lambda *_: network)
    with pytest.raises(ConfigError, match=r"to \(2, 3, 8, 8\), not images to one vector each"):
        timm_backbone.width_of("timm/as_deepseek_vit_412m_enc")


def test_synchronize_refuses_a_batchnorm_that_does_more():
    with pytest.raises(ConfigError, match=r"BatchNormAct2d is not a plain .* model\.sync_batchnorm=false"):
        synchronize(build_model("timm/regnety_002").encoder)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["test_vit", "test_resnet"])
def test_timm_backbone_trains_resumes_and_exports(tmp_path, name, capsys):
    words = [f"model.name=timm/{name}", "data.augmentation.size=32", "data.backend=torchvision"]
    words += ["criterion.unsupervised_batch_size=8", "criterion.supervised_imgs_per_class=2"]
    words += ["criterion.classes_per_batch=4", "optimization.warmup=0", "optimization.steps=3"]
    words += ["optimization.exclude_bias_and_norm=true"]
    whole, stopped = (small_config(tmp_path / name, *words) for name in ("whole", "stopped"))
    assert_continues(whole, stopped, 1)
    out = capsys.readouterr().out
    assert "scaled and decayed by LARS" in out and "plain SGD, no decay" in out
    images = torch.randn(2, 3, 32, 32)
    encoder = load_encoder(whole.run_folder).module.eval()
    options = {"dynamic_img_size": True} if "vit" in name else {}
    network = timm.create_model(name, num_classes=0, **options).eval()
    path = whole.run_folder / "export" / "timm.pth"  # checkpoint.export: [torchvision]
    network.load_state_dict(torch.load(path, weights_only=True), strict=True)
    folder = export(whole.run_folder, "safetensors")
    hub = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    with torch.no_grad():
        for each in (network, hub, load_encoder(path).module.eval()):
            assert torch.equal(each(images), encoder(images))
