"""Kernels of our own for CPUs, in C++ without dependencies, compiled when the package is built."""
