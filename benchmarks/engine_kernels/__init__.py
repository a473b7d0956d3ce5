"""The Triton kernels of serving engines, loaded from their wheels and timed by benchmarks/kernels.py."""
