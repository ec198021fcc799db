"""Train this experiment's network by lightly-train's SimCLR, which is installed apart: python lightly_peer.py SEED.

The photos, the network, their size, the batch and the passes are those of the run `simclr`; all else is lightly-train's
default, except its method, which needs a published teacher. Writes lightly-seedSEED.pth, an encoder for
`fastsuncet evaluate linear CONFIG --encoder`.
"""

import shutil
import sys

import lightly_train
import torch
from torch import Tensor, nn

from fastsuncet.models.resnet import build_model


class Network(nn.Module):
    """The encoder, with the methods that lightly-train asks of a model."""

    def __init__(self, encoder: nn.Module):
        super().__init__()
        self.encoder = encoder

    def get_model(self) -> nn.Module:
        return self.encoder

    def feature_dim(self) -> int:
        return 64

    def forward_features(self, x: Tensor, masks: Tensor | None = None) -> dict[str, Tensor]:
        for name, layer in self.encoder.named_children():
            if name == "avgpool":
                break
            x = layer(x)
        return {"features": x}

    def forward_pool(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"pooled_features": x["features"].mean((2, 3), keepdim=True)}


if __name__ == "__main__":
    seed = int(sys.argv[1])
    torch.set_num_threads(1)
    lightly_train.pretrain(
        out=f"lightly-seed{seed}",
        data="clothing40/train",
        model=Network(build_model("resnet_tiny", seed=seed).encoder),
        method="simclr",
        epochs=100,
        batch_size=128,
        num_workers=0,
        devices=1,
        accelerator="cpu",
        precision="32-true",
        seed=seed,
        transform_args={"image_size": (32, 32), "normalize": {"mean": (0, 0, 0), "std": (1, 1, 1)}},
    )
    shutil.copy(f"lightly-seed{seed}/exported_models/exported_last.pt", f"lightly-seed{seed}.pth")
