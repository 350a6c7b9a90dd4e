import pytest
import torch

from trainer.weights import deltas


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("changed", [0, 1, 500, 1000])
def test_what_is_applied_is_bit_for_bit_what_it_was(dtype, changed):
    torch.manual_seed(0)
    before = torch.randn(1000).to(dtype)
    after = before.clone()
    places = torch.randperm(1000)[:changed]
    after[places] = after[places] + 100
    kept = before.clone()
    delta = deltas.diff(before, after)
    assert sorted(delta.positions.tolist()) == sorted(places.tolist())
    assert torch.equal(deltas.apply(before, delta), after) and torch.equal(before, kept)
    assert delta.bytes == changed * (4 + dtype.itemsize)


def test_bits_count_and_not_values():
    before, after = torch.tensor([0.0, float("nan"), 1.0, float("nan")]), torch.tensor([-0.0, float("nan"), 1.0, 2.0])
    delta = deltas.diff(before, after)
    assert delta.positions.tolist() == [0, 3], "-0 is another number, a NaN that stays is none"
    assert torch.equal(deltas.apply(before, delta).view(torch.int32), after.view(torch.int32))


def test_views_of_a_larger_tensor_may_be_compared():
    whole = torch.arange(8, dtype=torch.bfloat16)
    assert deltas.apply(whole[:4], deltas.diff(whole[:4], whole[4:])).tolist() == [4, 5, 6, 7]
