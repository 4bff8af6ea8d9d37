"""The plan: bytes of every file, memory, disk, misfit shapes and kernels, from config and headers
only.
"""
