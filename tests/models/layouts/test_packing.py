"""Words of packed numbers, worked out by hand from what the projects' packers do.

None of these was made by a program: each word is written down from its numbers, lowest bits first.
"""

from __future__ import annotations

import torch

from tokenpod.models.layouts.packing import around, unpacked, unpacked_awq, words
from tokenpod.models.weights.mxfp4 import weight_of


def int32(*values: int) -> torch.Tensor:
    return torch.tensor([[value - (1 << 32) if value >> 31 else value for value in values]]).int()


def test_eight_numbers_of_4_bits_begin_in_the_lowest():
    assert unpacked(int32(0xFEDC3210), 4, 8).tolist() == [[0, 1, 2, 3, 12, 13, 14, 15]]


def test_numbers_of_2_and_8_bits():
    # 0b11_10_01_00, then 0b00_01_10_11, 0, 0b10_10_10_10
    assert unpacked(int32(0xAA001BE4), 2, 16).tolist() == [
        [0, 1, 2, 3, 3, 2, 1, 0, 0, 0, 0, 0, 2, 2, 2, 2]
    ]
    assert unpacked(int32(0x80FF017F), 8, 4).tolist() == [[0x7F, 1, 0xFF, 0x80]]


def test_numbers_of_3_bits_reach_from_one_word_into_the_next():
    # AutoGPTQ: ten in a word, then the lowest two bits of number 10 at bit 30, its highest bit at
    # bit 0 of the next; the lowest bit of number 21 at bit 31, its others at bits 0 and 1.
    first = 0b11 << 30 | 5  # number 0 is 5; number 10 is 7
    second = 0b1 | 0b001 << 1 | 1 << 31  # number 11 is 1; number 21 is 5
    third = 0b10 | 0b110 << 29  # number 31 is 6
    numbers = unpacked(int32(first, second, third), 3, 32).tolist()[0]
    expected = [0] * 32
    expected[0], expected[10], expected[11], expected[21], expected[31] = 5, 7, 1, 5, 6
    assert numbers == expected


def test_awq_has_even_outputs_of_a_word_first():
    # Places 0 to 7 have outputs 0, 2, 4, 6, 1, 3, 5, 7.
    assert unpacked_awq(int32(0x75316420)).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]


def test_mxfp4_has_the_first_number_of_a_byte_in_its_low_half():
    # e2m1: sign, two bits of exponent, one of mantissa; e8m0: the scale is 2 to the exponent - 127.
    block = [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE, *[0] * 7, 0x7F]
    weight = weight_of(torch.tensor([[block]]).byte(), torch.tensor([[128]]).byte())
    halves = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    numbers = [*halves, *(-x for x in halves), *[0] * 14, -6, 6]
    assert weight.dequantised(torch.float32).tolist() == [[2 * x for x in numbers]]


def test_a_part_that_begins_inside_a_word_takes_whole_words():
    assert around(range(12, 20), 4, 64) == (range(1, 3), range(8, 24))
    assert around(range(40, 96), 3, 96) == (range(3, 9), range(32, 96))
    assert around(range(60, 68), 4, 68) == (range(7, 9), range(56, 68))
    assert (words(32, 3), words(68, 4)) == (3, 9)
