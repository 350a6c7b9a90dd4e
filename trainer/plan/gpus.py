"""GPUs by what bounds a step on them, as their vendors' data sheets say it: memory, dense bfloat16 arithmetic, bandwidths.

Dense: without the sparsity that some sheets print first, at twice the number. A V100 has no bfloat16; its number is of float16.
The eight B200 of a DGX have 1,440 GB and 72 PFLOP/s of dense FP8, half of which is bfloat16's; MI300X have seven links of 64 GB/s.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from trainer.errors import ConfigError


@dataclass(frozen=True)
class Gpu:
    name: str
    memory: float  # bytes
    flops: float  # a second, bfloat16, dense
    bandwidth: float  # bytes a second of its memory
    link: float  # bytes a second to the other GPUs of a node, in one direction
    bfloat16: bool = True


def _gpu(name: str, gigabytes: float, teraflops: float, gigabytes_s: float, link: float, bfloat16: bool = True) -> Gpu:
    """`link` in GB/s of one direction, half of what sheets print for NVLink and PCIe."""
    return Gpu(name, gigabytes * 1e9, teraflops * 1e12, gigabytes_s * 1e9, link * 1e9, bfloat16)


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu(
            "V100", 32, 125, 900, 150, bfloat16=False
        ),  # https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf
        _gpu(
            "A100-40GB", 40, 312, 1555, 300
        ),  # https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet.pdf
        _gpu("A100-80GB", 80, 312, 2039, 300),  # the same sheet, SXM
        _gpu("A10G", 24, 70, 600, 16),  # https://d1.awsstatic.com/product-marketing/ec2/NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf
        _gpu("L4", 24, 121, 300, 32),  # https://www.nvidia.com/en-us/data-center/l4/ (242 with sparsity; PCIe Gen4 x16, 64 GB/s)
        _gpu("L40S", 48, 362, 864, 32),  # https://www.nvidia.com/en-us/data-center/l40s/ (362 without sparsity, 733 with)
        _gpu("H100", 80, 989, 3350, 450),  # https://www.nvidia.com/en-us/data-center/h100/ (SXM; 1,979 with sparsity)
        _gpu("H200", 141, 989, 4800, 450),  # https://www.nvidia.com/en-us/data-center/h200/ (SXM)
        _gpu("B200", 180, 2250, 8000, 900),  # https://www.nvidia.com/en-us/data-center/dgx-b200/ (1,440 GB of eight; 72 PFLOP/s FP8 halved)
        _gpu("MI300X", 192, 1307.4, 5300, 448),  # https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html
    )
}


def find(name: str) -> Gpu:
    """Whatever the case; A100 is the one of 80 GB. Raises ConfigError naming the nearest."""
    wanted = name.upper().replace("_", "-")
    wanted = {"A100": "A100-80GB", "A100-40": "A100-40GB", "A100-80": "A100-80GB"}.get(wanted, wanted)
    known = {key.upper(): gpu for key, gpu in GPUS.items()}
    if wanted in known:
        return known[wanted]
    near = difflib.get_close_matches(wanted, known, n=1, cutoff=0.5)
    hint = f"did you mean {known[near[0]].name}? " if near else ""
    raise ConfigError(f"--gpu {name}: not known; {hint}known are {', '.join(GPUS)}")
