"""Training an encoder and a classifier on labeled images: `fastsuncet finetune` and `fastsuncet transfer`."""
