"""Train this experiment's network on the labels alone with timm's parts: python timm_peer.py CONFIG [--mixup].

timm's training script is not in its package. These are its parts with usual settings: AdamW, a cosine after 5 epochs of
warm-up, RandAugment, random erasing, label smoothing, and with --mixup Mixup and CutMix. Prints the accuracy on the
held-out photos after 1,200 updates.
"""

import sys

import numpy as np
import torch
from PIL import Image
from timm.data import Mixup, create_transform
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch import nn

from fastsuncet.config import load_config
from fastsuncet.data.dataset import open_images
from fastsuncet.distributed.place import Place
from fastsuncet.models.resnet import build_model

EPOCHS, BATCH, SIZE, COLORS = 600, 128, 32, {"mean": (0, 0, 0), "std": (1, 1, 1)}

if __name__ == "__main__":
    config = load_config(sys.argv[1])
    one, seed = Place(0, 1, torch.device("cpu")), config.meta.seed
    images = open_images(config, one, validation=True)
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    generator = np.random.default_rng(seed)

    def opened(index, numbers):
        return [Image.open(index.path(int(i))).convert("RGB") for i in numbers]

    photos = opened(images.train, images.split.indices)
    labels = torch.from_numpy(images.train.labels[images.split.indices]).long()
    train = create_transform(
        SIZE, is_training=True, auto_augment="rand-m6-mstd0.5-inc1", re_prob=0.25, scale=(0.2, 1.0), **COLORS
    )
    test = create_transform(SIZE, crop_pct=1.0, **COLORS)

    classes = len(images.train.classes)
    network = nn.Sequential(build_model("resnet_tiny", seed=seed).encoder, nn.Linear(64, classes))
    optimizer = create_optimizer_v2(network, opt="adamw", lr=1e-3, weight_decay=0.05)
    schedule = CosineLRScheduler(optimizer, EPOCHS, warmup_t=5, warmup_lr_init=1e-6)
    mix = Mixup(0.8, 1.0, label_smoothing=0.1, num_classes=classes) if "--mixup" in sys.argv else None
    loss = SoftTargetCrossEntropy() if mix else LabelSmoothingCrossEntropy(0.1)
    for epoch in range(EPOCHS):
        schedule.step(epoch)
        order = generator.permutation(len(photos))
        for first in range(0, len(photos) - BATCH + 1, BATCH):
            chosen = order[first : first + BATCH]
            x, y = torch.stack([train(photos[i]) for i in chosen]), labels[chosen]
            x, y = mix(x, y) if mix else (x, y)
            optimizer.zero_grad()
            loss(network(x), y).backward()
            optimizer.step()

    network.eval()
    held_out = images.held_out
    with torch.no_grad():
        x = torch.stack([test(photo) for photo in opened(held_out, range(len(held_out)))])
        right = network(x).argmax(1) == torch.from_numpy(held_out.labels)
    print(f"{100 * right.float().mean():.2f} % of {len(right)}")
