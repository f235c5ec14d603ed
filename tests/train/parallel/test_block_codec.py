"""Quantised traffic of sharded models: the codec, and the gradients of real ranks against numpy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from launcher.train.parallel.block_codec import Part, RowCodec, part_of, row_of
from tests.helpers import torchrun

WORKER = Path(__file__).parent / "quantised_worker.py"
INT8, FLOAT8 = torch.int8, torch.float8_e4m3fn


@pytest.mark.parametrize(("codes", "share"), [(INT8, 0.5 / 127), (FLOAT8, 16 / 448)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("sizes", [(1,), (256,), (255, 3, 513)])
def test_error_is_a_share_of_the_largest_in_the_block(
    sizes: tuple[int, ...], dtype: torch.dtype, codes: torch.dtype, share: float
) -> None:
    """An int8 is off by half a step; a float8 by half of its last place, which is 32 from 256 to 448."""
    row = RowCodec([Part(size, dtype, codes) for size in sizes])
    numbers = torch.randn(3, sum(sizes)) * torch.logspace(-3, 2, sum(sizes))
    rows, back = numbers.to(dtype), torch.empty(3, sum(sizes), dtype=dtype)
    sent = row.encode(rows)
    assert sent.shape == (3, row.sent_bytes)
    assert row.sent_bytes == sum(size + 4 * -(-size // 256) for size in sizes)
    row.decode(sent, back)
    for got, wanted in zip(back.split(sizes, 1), rows.split(sizes, 1), strict=True):
        for part, block in zip(got.double().split(256, 1), wanted.double().split(256, 1), strict=True):
            rounding = torch.finfo(dtype).eps if dtype.itemsize < 4 else 1e-6
            bound = block.abs().amax(1, keepdim=True) * (share + rounding)
            assert ((part - block).abs() <= bound).all()


def test_what_is_not_a_wide_matrix_stays_as_it_is_beside_others() -> None:
    """Bytes of an odd number of narrow ones leave the next parameter unaligned."""
    parts = [
        part_of(3, torch.bfloat16, 1, INT8), part_of(5, torch.int8, 2, INT8), part_of(7, torch.float32, 2, INT8),
        part_of(1, torch.float32, 1, INT8), part_of(300, torch.bfloat16, 3, INT8),
    ]  # fmt: skip
    assert [part.codes for part in parts] == [None, None, INT8, None, INT8]
    values = [
        torch.randn(2, part.numel).to(part.dtype) if part.dtype.is_floating_point else torch.arange(10).view(2, 5)
        for part in parts
    ]
    data = torch.cat([v.to(p.dtype).contiguous().view(torch.uint8) for v, p in zip(values, parts, strict=True)], dim=1)
    row = RowCodec(parts)
    back = torch.empty_like(data)
    row.decode(row.encode(data), back)
    columns = [part.nbytes for part in parts]
    for part, before, after in zip(parts, data.split(columns, 1), back.split(columns, 1), strict=True):
        if part.codes is None:
            assert torch.equal(before, after)
        else:
            was, now = (each.clone().view(part.dtype).float() for each in (before, after))
            torch.testing.assert_close(now, was, rtol=0, atol=was.abs().max().item() / 100)


@pytest.mark.parametrize("codes", [INT8, FLOAT8])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_is_seen(value: float, codes: torch.dtype) -> None:
    row, numbers = RowCodec([Part(600, torch.float32, codes)]), torch.randn(1, 600)
    numbers[0, 300] = value
    back = torch.empty_like(numbers)
    row.decode(row.encode(numbers), back)
    assert not back[0, 300].isfinite()
    assert back[0, :256].isfinite().all()
    assert back[0, 512:].isfinite().all(), "of another block"


def test_zeros_and_the_smallest_numbers() -> None:
    row, numbers = RowCodec([Part(512, torch.float32, INT8)]), torch.zeros(1, 512)
    numbers[0, 300] = 1e-38
    back = torch.full_like(numbers, 5.0)
    row.decode(row.encode(numbers), back)
    torch.testing.assert_close(back, numbers, rtol=1e-5, atol=0)


def test_a_row_without_matrices_needs_no_codec() -> None:
    assert row_of((part_of(8, torch.float32, 1, INT8), part_of(8, torch.float32, 2, None))) is None


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "cases"), [(2, 9), (4, 6)])
def test_gradients_are_those_that_numpy_quantises(ranks: int, cases: int, tmp_path: Path) -> None:
    """Each applied gradient (clipped, of two windows) follows from what each rank sends, rounded by hand; it is not the
    exact one. All ranks compute with the same rounded matrices."""
    seen = json.loads(torchrun(WORKER, [str(ranks)], ranks, tmp_path).splitlines()[-1])
    assert len(seen) == cases
    for name, found in seen.items():
        assert found["by hand"] < 1e-6, (name, found)
        assert 1e-3 < found["exact"] < 0.06, (name, found)
        assert found["norm"] < 1e-6, (name, found)
        assert found["same"], name
        assert found["seen"] == (0 if "bf16" in name else 2)
        if "bf16" not in name:
            exact, rounded = found["evaluated"]
            assert exact < 1e-6, "an evaluation is of the parameters that a checkpoint has"
            assert (rounded > 1e-4) == ("compress_parameters" in name), name
        payload, wanted = found["payload"], found["wanted"]
        assert payload["reduce_scatter"] == wanted["reduce_scatter"], name
        if "gather_once" in name:
            assert payload["all_gather"] == wanted["gathered_once"], name


@pytest.mark.slow
def test_a_number_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    seen = json.loads(torchrun(WORKER, ["2", "nonfinite"], 2, tmp_path).splitlines()[-1])
    fp16 = seen.pop("fp16")
    assert fp16["skipped"] > 0, "an overflow of fp16 is seen, too, and has its own remedy"
    assert fp16["finite"]
    assert len(fp16["norms"]) == 2
    assert len(seen) == 4
    for name, message in seen.items():
        reason = "head.weight" if "gradient" in name else "The loss of step 1 is not finite"
        assert reason in message, name
        assert "Nothing was applied" in message


@pytest.mark.slow
def test_the_collectives_of_gpus_send_and_sum_the_same(tmp_path: Path) -> None:
    seen = json.loads(torchrun(WORKER, ["2", "collectives"], 2, tmp_path).splitlines()[-1])
    exchanged, *others = seen.values()
    assert len(others) == 2
    assert all(other == exchanged for other in others), seen
    assert exchanged[2:] == [0, 2 * (700 + 3 * 4 + 9 * 4), 2 * (700 + 3 * 4 + 9 * 4), 0, 0, 0]
