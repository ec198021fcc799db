"""CUDA C++ kernels: sources (*.cu), their compiler and their launcher. Each kernel's twin in PyTorch's operators
runs everywhere, and is what the kernel must agree with.

    LARS            lars.cu        fastsuncet/optim/lars_kernel.py          twin lars_foreach.py
    contrast        contrast.cu    fastsuncet/losses/contrast_kernel.py     twin contrast.py
    BatchNorm       norm.cu        fastsuncet/models/norm_kernel.py         twin torch's, sync_batchnorm.py

All three agree with their twins on an H200 (`pytest -m gpu`). Without a GPU the tests compile them for every generation
and run the same sources on a CPU, with a real thread for each CUDA thread (tests/support/host_shim).
"""
