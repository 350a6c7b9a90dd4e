"""Tensors of a GPU lent to another process on it, by CUDA IPC: it reads them where they lie.

https://docs.nvidia.com/cuda/cuda-c-programming-guide/#interprocess-communication, by torch.multiprocessing's own reductions
(https://docs.pytorch.org/docs/stable/multiprocessing.html#cuda-tensors).
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

# dtype, size, stride and offset of a tensor in the memory with this number
_Place = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int, int]


def lend(tensors: Iterable[torch.Tensor]) -> bytes:
    """What `borrow` in another process makes the same tensors of; they must live until it is done. Memory that some share is lent once."""
    numbers: dict[int, int] = {}
    memory: list[tuple[Any, Any]] = []
    places: list[_Place] = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in numbers:
            numbers[storage.data_ptr()] = len(memory)
            memory.append(reduce_tensor(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)))
        number = numbers[storage.data_ptr()]
        places.append((tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), number))
    return pickle.dumps((memory, places))


def borrow(message: bytes) -> list[torch.Tensor]:
    """The tensors of `lend`. Only from a process of the same run: it is unpickled."""
    memory, places = pickle.loads(message)
    bytes_of = [rebuild(*arguments) for rebuild, arguments in memory]
    whole = {(number, dtype): bytes_of[number].view(dtype) for dtype, _, _, _, number in places}
    return [whole[number, dtype].as_strided(size, stride, offset) for dtype, size, stride, offset, number in places]
