import torch

from trainer.engine import environment


def test_deepspeed_is_told_the_device_that_the_placement_chose():
    second = environment(5, 8, "10.0.0.1", 29500, torch.device("cuda", 1))
    assert (second["LOCAL_RANK"], second["RANK"], second["DS_ACCELERATOR"]) == ("1", "5", "cuda")
    on_cpu = environment(5, 8, "10.0.0.1", 29500, torch.device("cpu"))
    assert (on_cpu["LOCAL_RANK"], on_cpu["DS_ACCELERATOR"]) == ("0", "cpu")
