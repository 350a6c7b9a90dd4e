"""GPUs of this machine, counted from the kernel's files; the trees below are those of real drivers."""

from __future__ import annotations

from infra.local import build as local


def test_nvidia_gpus_are_their_numbered_device_files(tmp_path):
    dev = tmp_path / "dev"
    dev.mkdir()
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "nvidia-modeset", "null"):
        (dev / name).touch()
    assert local.gpus(dev, tmp_path / "none") == 3


def test_amd_gpus_are_the_compute_nodes_with_simd_units(tmp_path):
    for node, simds in enumerate((0, 0, 304, 1216)):  # two processors, two GPUs
        (tmp_path / f"kfd/{node}").mkdir(parents=True)
        (tmp_path / f"kfd/{node}/properties").write_text(f"cpu_cores_count {0 if simds else 64}\nsimd_count {simds}\nmem_banks_count 1\n")
    assert local.gpus(tmp_path / "none", tmp_path / "kfd") == 2
