"""Which cache blocks each request owns, and the slot of every token to be written."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class BlockTables:
    """Block ids of the held requests, in order.

    Rows are those of RequestStates. Ids only get appended: blocks that a sliding window left behind stay listed,
    because attention does not read them.
    """

    def __init__(self, max_num_reqs: int, max_num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._block_ids: NDArray[np.int32] = np.zeros((max_num_reqs, max_num_blocks), dtype=np.int32)
        self._num_blocks = [0] * max_num_reqs

    def set_blocks(self, req_index: int, block_ids: list[int]) -> None:
        """Start a row with the blocks of a new or resumed request."""
        self._num_blocks[req_index] = 0
        self.append_blocks(req_index, block_ids)

    def append_blocks(self, req_index: int, block_ids: list[int]) -> None:
        """Add blocks to the end of a row."""
        start = self._num_blocks[req_index]
        end = start + len(block_ids)
        assert end <= self._block_ids.shape[1], f"{end} blocks exceed the {self._block_ids.shape[1]} of max_model_len"
        self._block_ids[req_index, start:end] = block_ids
        self._num_blocks[req_index] = end

    def gather(self, req_indices: NDArray[np.intp], max_seq_len: int, out: NDArray[np.int32]) -> NDArray[np.int32]:
        """Copy the rows of a batch to out, a flat buffer, and give them as [num_reqs, blocks of max_seq_len]."""
        width = -(-max_seq_len // self.block_size)
        table = out[: len(req_indices) * width].reshape(len(req_indices), width)
        np.take(self._block_ids[:, :width], req_indices, axis=0, out=table, mode="clip")
        return table

    def slots(self, token_rows: NDArray[np.intp], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Give the slot of each token: block id times block size, plus the offset in the block.

        token_rows and positions are [num_tokens]: the request's row and the token's index in its request.
        """
        blocks, offsets = np.divmod(positions, self.block_size)
        slots: NDArray[np.int64] = self._block_ids[token_rows, blocks] * np.int64(self.block_size) + offsets
        return slots
