"""CUDA C++ sources, compiled by NVRTC when a worker starts. Read as package data; there is no code here."""
