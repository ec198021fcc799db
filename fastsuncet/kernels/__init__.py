"""CUDA C++ kernels: sources (*.cu), their compiler and their launcher. docs/speed.md has their twins.

All agree with their twins on an H200 (`pytest -m gpu`). Without a GPU the tests compile them for every generation and
run the same sources on a CPU, with a real thread for each CUDA thread (tests/support/host_shim).
"""
