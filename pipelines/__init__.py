"""Pixels: image files in, augmented batches on the device out. Knows nothing of models; never imports `fastsuncet`."""
