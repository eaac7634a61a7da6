"""This machine: its cores, its memory and its GPUs.

torch, which takes two seconds to import, is imported where it is asked: a cluster file is read without it.
"""

from __future__ import annotations

import os


def cores_each(num_processes: int) -> int:
    """Returns the cores of this machine that each of so many processes has."""
    knows_own = hasattr(os, "sched_getaffinity")  # macOS does not
    cores = len(os.sched_getaffinity(0)) if knows_own else os.cpu_count() or 1
    return max(1, cores // num_processes)


def machine_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def num_gpus() -> int:
    """Returns how many CUDA devices torch finds."""
    import torch

    return torch.cuda.device_count()


def gpu_memory_bytes(index: int) -> int:
    import torch

    num_bytes: int = torch.cuda.get_device_properties(index).total_memory
    return num_bytes


def num_threads() -> int:
    """Returns the threads that torch computes with in this process."""
    import torch

    return torch.get_num_threads()
