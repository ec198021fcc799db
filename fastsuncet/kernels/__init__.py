"""CUDA C++ kernels: sources (*.cu), their compiler and their launcher. Each kernel's twin in PyTorch's operators
lies next to its caller, runs everywhere, and is what the kernel must agree with.

    LARS            lars.cu        fastsuncet/optim/lars_kernel.py          twin lars_foreach.py
    contrast        contrast.cu    fastsuncet/losses/contrast_kernel.py     twin contrast.py
    BatchNorm       norm.cu        fastsuncet/models/norm_kernel.py         twin fused_batchnorm.py

No kernel here has run on a GPU yet. The tests compile them for every generation of GPUs and run the same sources on a
CPU, with a real thread for each CUDA thread (tests/support/host_shim).
"""
