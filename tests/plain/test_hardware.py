"""Modelled devices against what others measured on real ones."""

from statistics import mean

import pytest

from coserve.simulate.hardware import A100, CATALOGUE, H100, Hardware

# bfloat16 products on an H100, TFLOP/s: rows, columns, sums. From the default table of XLA's cost
# model: github.com/openxla/xla, xla/service/gpu/model/matmul_interpolator_data.h ("sm_90", one
# product at a time).
_PUBLISHED = {
    (256, 2048, 4096): 288.3,
    (512, 4096, 4096): 653.1,
    (2048, 1024, 4096): 659.1,
    (4096, 2048, 4096): 764.1,
    (2048, 512, 4096): 455.7,
    (512, 256, 4096): 92.2,
    (2048, 4096, 4096): 760.4,
    (512, 1024, 4096): 305.0,
    (2048, 4096, 2048): 717.5,
    (1024, 2048, 2048): 526.3,
    (512, 512, 2048): 115.3,
    (4096, 256, 2048): 310.0,
    (256, 256, 1024): 17.8,
    (256, 4096, 1024): 229.0,
    (1024, 1024, 1024): 246.7,
    (1024, 512, 1024): 141.9,
    (4096, 4096, 1024): 681.1,
    (4096, 1024, 1024): 491.6,
    (2048, 2048, 1024): 492.1,
    (256, 1024, 1024): 73.7,
    (1024, 4096, 512): 340.7,
    (4096, 4096, 512): 543.4,
    (2048, 512, 512): 148.1,
    (256, 4096, 512): 142.8,
    (1024, 4096, 256): 214.7,
    (4096, 4096, 256): 393.0,
    (2048, 1024, 256): 139.8,
    (256, 256, 256): 6.2,
    (2048, 2048, 256): 215.1,
}


def test_products_of_every_shape_are_as_fast_as_measured():
    errors = []
    for (rows, columns, sums), teraflops in _PUBLISHED.items():
        seconds = H100.product_s(rows, columns, sums, 2)
        errors.append(abs(seconds / (2 * rows * columns * sums / (1e12 * teraflops)) - 1))
    assert mean(errors) < 0.07 and max(errors) < 0.2


@pytest.mark.parametrize("hardware", CATALOGUE.values(), ids=CATALOGUE)
def test_a_few_rows_take_one_read_of_the_weights(hardware: Hardware):
    read_s = 2 * 4096 * 14336 / hardware.bytes_per_s
    for rows in (1, 8, 32):
        took_s = hardware.product_s(rows, 14336, 4096, 2) - hardware.call_s
        assert read_s <= took_s < 1.02 * read_s


def test_more_rows_never_take_less_time_and_large_products_reach_the_pace():
    for hardware in CATALOGUE.values():
        seconds = [hardware.product_s(rows, 4096, 4096, 2) for rows in range(1, 3000, 7)]
        assert seconds == sorted(seconds)
        pace = 2 * 8192**3 / hardware.product_s(8192, 8192, 8192, 2)
        assert 0.9 * hardware.flops_per_s < pace <= hardware.flops_per_s


def test_a_part_of_a_device_is_slower_where_it_computes_more_than_where_it_reads():
    half = A100.part(5)
    assert half.product_s(4096, 4096, 4096, 2) == pytest.approx(
        2 * A100.product_s(4096, 4096, 4096, 2), rel=0.15
    )
    assert half.product_s(1, 14336, 4096, 2) == pytest.approx(A100.product_s(1, 14336, 4096, 2))
    assert A100.part(2).product_s(1, 14336, 4096, 2) > 2 * half.product_s(1, 14336, 4096, 2)
