"""Keys and values in pages: the same numbers as contiguous memory, whatever was in the pages
before."""

import pytest
import torch
from support import make_adapter, make_backbone, random_tokens

from coserve.memory.tensors.paged_kv import PagedKv
from coserve.models import CachedSequence, forward


def make_pages(dtype: str = "float32") -> PagedKv:
    pages = PagedKv(make_backbone("llama", dtype), num_pages=60, block_tokens=4)
    pages.pages.fill_(torch.nan)
    return pages


def test_chunks_in_pages_are_the_rows_of_a_contiguous_sequence():
    pages, tokens, table = make_pages(), random_tokens(18, 0), [7, 3, 50, 1, 9]
    plain = CachedSequence(pages.backbone, 18)
    for start, end in ((0, 5), (5, 6), (6, 16), (16, 17), (17, 18)):
        ours = forward(pages.backbone, [pages.rows([(table, start, tokens[start:end].tolist())])])
        theirs = forward(pages.backbone, [plain.extend(tokens[start:end])])
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 5e-2)])
def test_sequences_of_all_lengths_run_together_as_each_does_alone(dtype, tolerance):
    """Decoding rows and a prompt's chunk, with any adapter, as one group of rows."""
    pages = make_pages(dtype)
    adapters = [make_adapter(pages.backbone, seed=seed).bypasses() for seed in (1, 2)]
    bypasses = [None, adapters[0], None, adapters[1], adapters[0]]
    together, expected = [], []
    for index, (length, count, own) in enumerate(
        zip((30, 3, 9, 4, 1), (1, 1, 6, 1, 1), bypasses, strict=True)
    ):
        tokens, table = (
            random_tokens(length + count, length),
            list(range(10 * index, 10 * index + 10)),
        )
        plain = CachedSequence(pages.backbone, length + count, own)
        forward(pages.backbone, [plain.extend(tokens[:length])])
        forward(pages.backbone, [pages.rows([(table, 0, tokens[:length].tolist())], own)])
        expected.append(forward(pages.backbone, [plain.extend(tokens[length:])]))
        together.append(pages.rows([(table, length, tokens[length:].tolist())], own))
    ours = forward(pages.backbone, together)
    torch.testing.assert_close(ours, torch.cat(expected), atol=tolerance, rtol=tolerance)
