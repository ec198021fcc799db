"""CUDA C++ of our own: sources (*.cu), their compiler and their launcher. Each kernel's twin in PyTorch's operators
stands with its caller, runs everywhere, and is what the kernel is held to.

    LARS            lars.cu        fastsuncet/optim/lars_kernel.py          twin lars_foreach.py
    contrast        contrast.cu    fastsuncet/losses/contrast_kernel.py     twin contrast.py
    BatchNorm       norm.cu        fastsuncet/models/fused_batchnorm.py               twin in the same file

No kernel here has run on a card yet. They are compiled for every architecture in the tests, and the same sources run
there on a CPU, with a thread for each of theirs (tests/host_shim).
"""
